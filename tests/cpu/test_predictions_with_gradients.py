"""A script that calls models with gradients enabled, and computes none, predicts; what gradients cost it is said, from a trace without them."""

from pathlib import Path

import pytest

import tightfit
from tightfit import fit
from tightfit.capture.steps import predictions
from tightfit.capture.targets.target_kinds import Script
from tightfit.capture.trace import Traced, trace
from tightfit.errors import NoStep
from tightfit.tape import Category, SpanKind
from tightfit.tape.allocated_bytes import allocated_bytes
from tightfit.units import MIB, format_bytes

_PREDICTS = """
import torch

{begin}
model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.ReLU()) for _ in range(4))).cuda()
{before}
kept = []
for _ in range({turns}):
    answer = model(torch.randn(1024, 1024, device="cuda"))
    {then}
"""


def _written(folder: Path, **parts: object) -> str:
    path = folder / "answer.py"
    path.write_text(_PREDICTS.format(**{"begin": "", "before": "", "turns": 3, "then": "pass", **parts}))
    return str(path)


def _traced(folder: Path, **parts: object) -> Traced:
    script = Script(path=_written(folder, **parts), arguments=())
    return trace(script, label="answer.py", device="A100-40GB")


@pytest.mark.parametrize(("then", "num_held"), [("pass", 10), ("kept.append(answer)", 24)], ids=["dropped", "kept"])
def test_all_of_it_is_one_step_with_what_each_call_holds(then: str, num_held: int, tmp_path: Path) -> None:
    traced = _traced(tmp_path, then=then, turns=5)
    assert traced.predicts_with_gradients
    assert list(traced.tape.spans.kind).count(SpanKind.STEP) == 1
    # Each call leaves its input and an output of each of four layers, through the next call; the first input is older than what is called.
    held = allocated_bytes(traced.tape, traced.tape.storages.category == Category.ACTIVATIONS).max()
    assert held == num_held * 4 * MIB


def test_the_estimate_says_what_gradients_cost(tmp_path: Path) -> None:
    plain = _traced(tmp_path, begin="torch.set_grad_enabled(False)").tape
    tape = fit.capture(_written(tmp_path), device="A100-40GB")
    first = tape.assumptions[0].what
    assert "torch.no_grad()" in first
    assert format_bytes(int(allocated_bytes(plain).max())) in first
    assert format_bytes(int(allocated_bytes(tape).max())) in first


def test_a_plan_advises_it_first(tmp_path: Path) -> None:
    plan = tightfit.plan(_written(tmp_path), "A100-40GB", budget="200MiB")
    assert plan.advice[0].startswith("call the model within `torch.no_grad()`")
    assert not any(
        "saves activations" in reason
        for row in plan.to_json()["alternatives"]
        for reason in row.values()
        if isinstance(reason, str)
    )


def test_no_figure_is_given_where_the_script_switches_gradients_on(tmp_path: Path) -> None:
    tape = fit.capture(_written(tmp_path, begin="torch.set_grad_enabled(True)"), device="A100-40GB")
    assert "MiB" not in tape.assumptions[0].what


@pytest.mark.parametrize(
    ("before", "then"),
    [("optimizer = torch.optim.SGD(model.parameters())", "pass"), ("torch.optim.SGD(model.parameters())", "pass")],
    ids=["lives", "is gone"],
)
def test_a_script_with_an_optimizer_was_to_train(before: str, then: str, tmp_path: Path) -> None:
    with pytest.raises(NoStep, match="without a step"):
        _traced(tmp_path, before=before, then=then)


@pytest.mark.slow
def test_a_long_loop_is_left_and_the_verdict_says_so(tmp_path: Path) -> None:
    traced = _traced(tmp_path, turns=10_000)
    assert "stopped after" in traced.tape.coverage.stopped
    # Not after a step: what it is left in is the only one, and its time that of a part.
    assert traced.tape.coverage.left_at.endswith("answer.py:9")
    number = traced.tape.coverage.stopped.removeprefix("stopped after ").removesuffix(" calls of a model")
    assert any(f"its time is that of its first {number} calls" in each.what for each in traced.tape.assumptions)
    max_calls, max_operators = predictions.MAX_WITH_GRADIENTS
    assert traced.tape.operators.name.size >= max_operators > max_calls
