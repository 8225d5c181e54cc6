"""Tiles of a module whose parts have weights that are streamed: each part brings its own, so that the whole cannot be proved; it is refused in words.
Parts of a batch are proved as if the weights were on the card, where they are when their blocks run."""

from pathlib import Path
from typing import Any

import pytest

from tightfit.analysis.profile import Profile
from tightfit.capture.targets.target_kinds import GeneratorFunction
from tightfit.capture.trace import Preparation, trace
from tightfit.devices.catalogue import find
from tightfit.errors import ApplyError
from tightfit.tape import Tape
from tightfit.techniques.registry import technique

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
    with pytest.raises(ApplyError, match=r"Net\.inner cannot be run in tiles: 0\.weight is streamed to the GPU"):
        trace(target, label="steps", device="RTX 4090", num_steps=2, preparation=preparation)


BLOCKS = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(128, 512), nn.Linear(512, 128)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.chain = nn.Sequential(*[nn.Conv2d(8, 8, 3, padding=1) for _ in range(4)])
        self.blocks = nn.Sequential(Block(), Block(), Block())
        self.last = nn.Linear(128, 8)

    def forward(self, images):
        return self.last(self.blocks(self.chain(images).flatten(1).view(-1, 64, 128)))


def steps():
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    while True:
        optimizer.zero_grad()
        model(torch.randn(8, 8, 32, 32, device="cuda")).square().mean().backward()
        optimizer.step()
        yield
"""


def test_plans_mix_streamed_weights_with_what_a_run_takes_beside_them(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(BLOCKS)
    target = GeneratorFunction(location=str(file), function="steps", parameters={})

    def traced(choices: list[dict[str, Any]]) -> Tape:
        preparation = Preparation(function="tightfit.runtime.attach:prepare", argument={"choices": choices})
        return trace(target, label="steps", device="RTX 4090", num_steps=2, preparation=preparation).tape

    profile = Profile(traced([]), find("RTX 4090"))
    options = {name: list(technique(name).options(profile)) for name in ("tiled_tokens", "tiled_convolutions")}
    streamed = next(
        o for o in technique("trained_weight_streaming").options(profile) if "chain.0" in o.settings["blocks"]
    )
    around = [o for o in options["tiled_tokens"] if o.where == "Net.blocks"] + options["tiled_convolutions"]
    inside = [o for o in options["tiled_tokens"] if o.where != "Net.blocks"]
    assert around and all(streamed.slots & o.slots for o in around)
    assert inside and not any(streamed.slots & o.slots for o in inside)
    offload = next(iter(technique("activation_offload").options(profile)))
    # In either order: weights at the host are no place that activations come from.
    for chosen in ([streamed, offload], [offload, streamed], [streamed, inside[0]]):
        given = {"saves_bytes": 0, "adds_seconds": 0.0, "exact": True}
        assert traced([{"technique": o.technique, "where": o.where, "settings": o.settings, **given} for o in chosen])
