"""Tiles of a module whose parts have weights that are streamed: each part brings its own, so that the whole cannot be proved; it is refused in words.
Parts of a batch are proved as if the weights were on the card, where they are when their blocks run."""

from pathlib import Path

import pytest

from tightfit.capture.targets.target_kinds import GeneratorFunction
from tightfit.capture.trace import Preparation, trace
from tightfit.errors import ApplyError

PROGRAM = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64))
        self.head = nn.Linear(64, 4096)

    def forward(self, x):
        return self.head(self.inner(x))


def steps():
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    while True:
        optimizer.zero_grad()
        model(torch.randn(8, 64, device="cuda")).square().mean().backward()
        optimizer.step()
        yield
"""


OF_PARTS = """
import torch
from torch import nn


class Doubled(nn.Linear):
    def forward(self, x):
        return x @ (2 * self.weight).T + self.bias


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), Doubled(64, 64))
        self.head = nn.Linear(64, 16)

    def forward(self, x, y):
        hidden = self.inner(x)
        return nn.functional.cross_entropy(self.head(hidden{mixed}), y)


def steps():
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    while True:
        optimizer.zero_grad()
        model(torch.randn(8, 64, device="cuda"), torch.zeros(8, dtype=torch.long, device="cuda")).backward()
        optimizer.step()
        yield
"""


@pytest.mark.parametrize("mixed", ["", " - hidden.mean(0)"])
def test_parts_of_a_batch_are_proved_with_weights_that_are_away(mixed: str, tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(OF_PARTS.replace("{mixed}", mixed))
    given = {"saves_bytes": 0, "adds_seconds": 0.0, "exact": True}
    streamed = {"blocks": ["inner.0", "inner.2"], "smallest_bytes": 1, "host_bytes": 1 << 22}
    choices = [
        {"technique": "micro_batches", "where": "batch", "settings": {"num_parts": 2, "draws_anew": False}, **given},
        {"technique": "trained_weight_streaming", "where": "Net", "settings": streamed, **given},
    ]
    preparation = Preparation(function="tightfit.runtime.attach:prepare", argument={"choices": choices})
    target = GeneratorFunction(location=str(file), function="steps", parameters={})
    if not mixed:
        assert trace(target, label="steps", device="RTX 4090", num_steps=2, preparation=preparation).tape
        return
    with pytest.raises(ApplyError, match=r"aten\.mean\.dim works along the rows at program\.py"):
        trace(target, label="steps", device="RTX 4090", num_steps=2, preparation=preparation)


def test_tiles_around_streamed_weights_are_refused_and_are_no_fault(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    given = {"saves_bytes": 0, "adds_seconds": 0.0, "exact": True}
    streamed = {"blocks": ["inner.0", "inner.2"], "smallest_bytes": 1, "host_bytes": 1 << 22}
    choices = [
        {"technique": "tiled_tokens", "where": "Net.inner", "settings": {"num_tiles": 2}, **given},
        {"technique": "trained_weight_streaming", "where": "Net", "settings": streamed, **given},
    ]
    preparation = Preparation(function="tightfit.runtime.attach:prepare", argument={"choices": choices})
    target = GeneratorFunction(location=str(file), function="steps", parameters={})
    with pytest.raises(ApplyError, match=r"Net\.inner cannot be run in tiles: 0\.weight comes to the card"):
        trace(target, label="steps", device="RTX 4090", num_steps=2, preparation=preparation)
