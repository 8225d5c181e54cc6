"""A teacher or a reference model that runs without gradients in each turn is a part of the step, wherever in the turn it is called; an evaluation is not."""

from pathlib import Path

import pytest

import tightfit
from tightfit.capture.steps.recurring_calls import with_recurring_calls
from tightfit.tape import SpanKind

PROGRAM = """
import torch
from torch import nn
teacher = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)]).cuda().requires_grad_(False)
student = nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.SGD(student.parameters(), 0.1)
for turn in range(6):
    x = torch.randn(8192, 1024, device="cuda")
{turn}
    (out - goal).square().mean().backward(); optimizer.step(); optimizer.zero_grad()
"""
NO_GRAD = "    with torch.no_grad(): goal = teacher(x)"
TURNS = {
    "with gradients": "    out = student(x); goal = teacher(x)",
    "first": f"{NO_GRAD}\n    out = student(x)",
    "after the forward pass": f"    out = student(x)\n{NO_GRAD}",
}


def estimated(folder: Path, turn: str, steps: int = 3) -> tightfit.Estimate:
    script = folder / "train.py"
    script.write_text(PROGRAM.format(turn=turn))
    return tightfit.estimate(script, "RTX 3090", steps=steps)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tightfit.Estimate:
    return estimated(tmp_path_factory.mktemp("plain"), TURNS["with gradients"])


@pytest.mark.parametrize(("where", "steps"), [("first", 3), ("after the forward pass", 3), ("first", 5)])
def test_its_seconds_and_its_memory_count(plain: tightfit.Estimate, tmp_path: Path, where: str, steps: int) -> None:
    found = estimated(tmp_path, TURNS[where], steps)
    assert found.seconds_per_step == pytest.approx(plain.seconds_per_step, rel=0.02)
    assert [span.name for span in found.spans[: steps + 1]] == ["set-up", *(f"step {n + 1}" for n in range(steps))]


def test_each_of_several_calls_counts(plain: tightfit.Estimate, tmp_path: Path) -> None:
    often = "    out = student(x)\n    for _ in range(5):\n    " + NO_GRAD
    found = estimated(tmp_path, often)
    once = estimated(tmp_path, "    out = student(x); goal = x")
    rest = plain.seconds_per_step - once.seconds_per_step
    assert found.seconds_per_step == pytest.approx(once.seconds_per_step + 5 * rest, rel=0.03)


def test_an_evaluation_between_two_steps_does_not(plain: tightfit.Estimate, tmp_path: Path) -> None:
    turn = f"    if turn == 2:\n        for _ in range(9):\n        {NO_GRAD}\n{TURNS['with gradients']}"
    assert estimated(tmp_path, turn).seconds_per_step == pytest.approx(plain.seconds_per_step, rel=0.02)


def test_what_comes_before_every_step_becomes_a_part_of_it() -> None:
    kinds = {"s": SpanKind.STEP, "e": SpanKind.ASIDE, "u": SpanKind.SETUP}

    def merged(names: str, cut: str = "") -> str:
        spans = [(name, kinds.get(name[0], SpanKind.ASIDE), n, n) for n, name in enumerate(names.split())]
        found = with_recurring_calls(spans, lambda number: spans[number][0] not in cut.split())
        return " ".join(f"{name}@{begin}" for name, _, begin, _ in found)

    assert merged("u a s a s a s") == "u@0 s@1 s@3 s@5"
    assert merged("u s a s a s a") == "u@0 s@1 s@2 s@4 a@6"
    assert merged("u a b s a b s e a b s") == "u@0 s@1 s@4 e@7 s@8"
    assert merged("u a s s a s") == "u@0 a@1 s@2 s@3 a@4 s@5"
    assert merged("u a s") == "u@0 a@1 s@2"
    assert merged("u a s a s", cut="a") == "u@0 a@1 s@2 a@3 s@4"
