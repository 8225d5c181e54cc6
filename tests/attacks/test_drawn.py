"""Programs with several techniques at once, drawn as a plan may hold them: one in ninety is tried here, all by `python -m tests.attacks.together`.

What is drawn is what a plan may hold: two candidates share a slot where the options of a trace do.
"""

import importlib.util
import itertools
import random
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.attacks.drawn import candidates, draw
from tests.attacks.places import VARIANTS
from tests.attacks.registry import attacks
from tests.attacks.together import BAD, run_drawn

from tightfit.analysis.profile import Profile
from tightfit.capture.targets.target_kinds import GeneratorFunction
from tightfit.capture.trace import trace
from tightfit.devices.catalogue import find
from tightfit.techniques.registry import techniques

CARD = "RTX 4090"
PROGRAM = """
import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    is_attention = True

    def __init__(self, width):
        super().__init__()
        self.norm, self.query, self.key, self.value = nn.LayerNorm(width), *(nn.Linear(width, width) for _ in range(3))
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        y = self.norm(x)
        x = x + (self.query(y) @ self.key(y).transpose(1, 2)).softmax(-1) @ self.value(y)
        return x + self.mlp(x)


class Net(nn.Module):
    returns_loss = True

    def __init__(self, width, is_frozen):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(6))
        self.head = nn.Linear(width, 64 * width)
        for block in self.blocks:
            for parameter in block.parameters():
                parameter.requires_grad_(parameter.dim() < 2 or not is_frozen)

    def forward(self, x, y):
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), y.flatten())


def steps(is_frozen):
    model = Net(64, is_frozen).cuda()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.1)
    while True:
        x, y = torch.randn(16, 128, 64, device="cuda"), torch.zeros(16, 128, dtype=torch.long, device="cuda")
        optimizer.zero_grad()
        model(x, y).backward()
        optimizer.step()
        yield
"""
_TELLS = ("begin", "end", "in_backward", "recomputed", "blocks", "gradients_in", "master")


def _program(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("drawn_program", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _is_tried(name: str) -> bool:
    return zlib.crc32(f"{name} with several techniques".encode()) % 90 == 0


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if _is_tried(name) else pytest.mark.slow) for name in attacks()]
)
def test_a_program_with_several_techniques_is_trained_right_or_refused(name: str) -> None:
    torch.set_num_threads(1)
    verdict, taken = run_drawn(attacks()[name], "0")
    assert verdict.outcome not in BAD, f"{verdict.reason}: {' + '.join(taken)}"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if zlib.crc32(f"{name} dressed".encode()) % 180 == 0 else pytest.mark.slow)
        for name in attacks()
    ],
)
def test_a_fine_tuned_program_with_several_techniques_is_trained_right_or_refused(name: str) -> None:
    torch.set_num_threads(1)
    verdict, taken = run_drawn(attacks()[name], "1", is_dressed=True)
    assert verdict.outcome not in BAD, f"{verdict.reason}: {' + '.join(taken)}"


def _key(technique: str, where: str, settings: Mapping[str, Any]) -> tuple[str, ...]:
    return technique, where, *(str(settings.get(name)) for name in _TELLS)


@pytest.mark.parametrize("is_frozen", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_candidates_share_slots_as_options_do(is_frozen: bool, tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    target = GeneratorFunction(location=str(file), function="steps", parameters={"is_frozen": is_frozen})
    profile = Profile(trace(target, label="steps", device=CARD, num_steps=2).tape, find(CARD))
    offered = {
        _key(o.technique, o.where, o.settings): o.slots for t in techniques().values() for o in t.options(profile)
    }
    model = _program(file).Net(8, is_frozen)
    optimizers = [torch.optim.Adam([p for p in model.parameters() if p.requires_grad])]
    drawn = {
        _key(each.choice.technique, each.choice.where, each.choice.settings): each.slots
        for number in range(60)
        for each in candidates(model, optimizers, random.Random(number))
    }
    both = sorted(offered.keys() & drawn.keys())
    # Blocks in several ways, the head, the batch, the optimizer: far more than one technique.
    assert len({technique for technique, *_ in both}) >= 12
    others = [
        (one, other)
        for one, other in itertools.combinations(both, 2)
        if bool(offered[one] & offered[other]) != bool(drawn[one] & drawn[other])
    ]
    assert others == []


def test_what_is_drawn_together_shares_no_slot() -> None:
    found = []

    def program(model: torch.nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        for number in range(20):
            found.append(list(draw(model, optimizers, tuple(VARIANTS), random.Random(number))))

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            return program if name == "apply" else lambda *_: None

    attacks()["plain_loop"].program(Recorder())  # type: ignore[arg-type]
    assert max(map(len, found)) > 4
    for taken in found:
        assert sum(len(each.slots) for each in taken) == len(frozenset().union(*(each.slots for each in taken)))
