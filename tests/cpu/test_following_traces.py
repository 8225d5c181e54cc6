"""A trace with techniques ends where the plain one did, though the loop that runs then is a library's, and techniques add operators."""

from types import SimpleNamespace
from typing import Any

import pytest

from tightfit.capture.after_steps.fast_forward import MIN_OPERATORS, EndOfCapture, FastForward
from tightfit.tape import Coverage, SpanKind


def forward(follows: Coverage | None) -> tuple[FastForward, Any]:
    recorder = SimpleNamespace(num_operators=0, spans=[("step 3", SpanKind.STEP)], assume=lambda *_: None)
    recorder.span = lambda name, kind: recorder.spans.append((name, kind))
    gpu: Any = SimpleNamespace(
        recorder=recorder,
        operators=SimpleNamespace(progress=None),
        attribution=SimpleNamespace(where=lambda: "train.py:8"),
    )
    found = FastForward(gpu, 3, settle=lambda: None, parameters=list, follows=follows)
    found.begin(is_stoppable=False)
    return found, recorder


def test_a_trace_that_follows_another_ends_behind_the_call_in_which_that_one_did() -> None:
    plain, recorder = forward(None)
    plain.call_begins()
    plain.call_begins()
    recorder.num_operators = 3 * MIN_OPERATORS
    with pytest.raises(EndOfCapture):
        plain._gpu.operators.progress("", 0)
    coverage = plain.coverage()
    assert (coverage.last_turn, coverage.last_call) == (0, 2)
    assert Coverage.from_json(coverage.to_json()) == coverage

    other, recorder = forward(coverage)
    other.call_begins()
    other.call_begins()
    # Within the call techniques add operators.
    recorder.num_operators = 6 * MIN_OPERATORS
    other._gpu.operators.progress("", 0)
    with pytest.raises(EndOfCapture):
        other.call_begins()
    assert other.coverage().stopped == coverage.stopped
