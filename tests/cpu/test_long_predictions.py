"""When the trace of a script that only predicts ends before the script does."""

import ast
from types import SimpleNamespace
from typing import Any

import pytest

from tightfit.capture.steps.predictions import MAX_WITH_GRADIENTS, MAX_WITHOUT_GRADIENTS, is_long

PREDICTS = "for _ in range(1000):\n    x = model(x)"


def after(source: str = PREDICTS, last_call: int | None = None) -> Any:
    follows = None if last_call is None else SimpleNamespace(last_call=last_call)
    return SimpleNamespace(follows=follows, program=SimpleNamespace(trees={"sample.py": ast.parse(source)}))


@pytest.mark.parametrize("with_gradients", [False, True])
def test_it_ends_with_more_calls_and_operators_than_the_bounds(with_gradients: bool) -> None:
    calls, operators = MAX_WITH_GRADIENTS if with_gradients else MAX_WITHOUT_GRADIENTS

    def ends(num_calls: int, num_operators: int) -> bool:
        return is_long(after(), num_calls, num_operators, with_gradients=with_gradients, was_to_train=False)

    assert ends(calls + 1, operators + 1)
    assert not ends(calls, operators + 1)
    assert not ends(calls + 1, operators)


@pytest.mark.parametrize(
    ("source", "was_to_train"),
    [
        (PREDICTS, True),
        (f"{PREDICTS}\nloss.backward()", False),
        (f"{PREDICTS}\nTrainer(model, arguments).train()", False),
        (f"def training_step(self, batch): ...\n{PREDICTS}", False),
    ],
)
def test_an_evaluation_before_training_is_no_end(source: str, was_to_train: bool) -> None:
    assert not is_long(after(source), 10_000, 10**9, with_gradients=False, was_to_train=was_to_train)


def test_a_trace_with_techniques_ends_at_the_same_call_as_the_one_without() -> None:
    ends = [n for n in range(400) if is_long(after(last_call=350), n, 10**9, with_gradients=False, was_to_train=False)]
    assert ends == [350]
