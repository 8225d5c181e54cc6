"""A plan leaves out what the effects of a program forbid, says why with the user's line, and keeps what they do not forbid."""

from pathlib import Path

import pytest

import tightfit
from tightfit.techniques.registry import techniques

PROGRAM = """\
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(256, 1024), nn.Linear(1024, 256)
        self.calls = 0

    def forward(self, rows):
        self.calls += 1
        return rows + self.narrow(torch.nn.functional.gelu(self.wide(rows)))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, rows):
        for block in self.blocks:
            rows = block(rows)
        return rows


def counting_and_reading():
    model = Stack().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        model(torch.randn(16384, 256, device="cuda")).sum().backward()
        assert all(p.grad is not None for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        yield


def with_a_penalty():
    model = Stack().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        rows = torch.randn(16384, 256, device="cuda", requires_grad=True)
        loss = model(rows).square().mean()
        (slope,) = torch.autograd.grad(loss, rows, create_graph=True)
        (loss + slope.square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield
"""


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)


def refused(function: str, *allowed: str) -> dict[str, str]:
    """Why each technique is left out of a plan that would need it, where these alone may be taken."""
    without = [name for name in techniques() if name not in allowed]
    plan = tightfit.plan(f"program.py:{function}", "RTX 4090", budget="900MiB", steps=2, without=without)
    assert not plan.choices
    return {a.name: a.why for a in plan.alternatives if a.why.startswith("refused: ")}


def line(text: str) -> str:
    return f"(program.py:{next(n for n, line in enumerate(PROGRAM.splitlines(), 1) if text in line)})"


def test_a_counter_and_a_reader_of_gradients() -> None:
    found = refused("counting_and_reading", "tiled_tokens", "update_in_backward")
    assert found["tiled_tokens"].endswith(f"Stack.blocks.* (4): changes Block.calls {line('self.calls += 1')}")
    assert found["update_in_backward"].endswith(
        f"optimizer: reads gradients between the backward pass and the step {line('assert all')}"
    )


def test_a_gradient_penalty() -> None:
    found = refused("with_a_penalty", "checkpointing", "selective_checkpointing", "nested_checkpointing")
    assert found["checkpointing"].startswith("refused: Stack.blocks.* (4): is run backwards with create_graph=True")
    assert found["checkpointing"].endswith(line("create_graph=True"))
    assert found.keys() <= {"checkpointing", "selective_checkpointing", "nested_checkpointing"}
