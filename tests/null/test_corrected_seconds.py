"""A plan whose traced run takes another time than predicted: its options' seconds are corrected and the choice is made again, a bounded number of times."""

import dataclasses
from typing import Any, cast

import numpy as np
import pytest
from tests.null.test_text_report import ESTIMATE

from tightfit.fit.searching.candidates import Candidate, Candidates
from tightfit.fit.searching.corrected_seconds import is_off, looked_again, predicted_seconds
from tightfit.fit.searching.variants import Variant
from tightfit.fit.traced_runs import TracedRun
from tightfit.planner import problem as problems
from tightfit.planner.option import Change, Option
from tightfit.planner.solution import Solution
from tightfit.planner.solve import solve

MIB = 1 << 20


def option(technique: str, saved: int, seconds: float) -> Option:
    changes = (Change(begin=1, end=2, num_bytes=-saved * MIB),)
    return Option(
        technique=technique, where="Net", changes=changes, seconds=seconds, exact=True, slots=frozenset({"Net"})
    )


def traced(seconds: float) -> TracedRun:
    estimate = dataclasses.replace(ESTIMATE, seconds_per_step=seconds)
    unused = cast(Any, None)
    return TracedRun(
        options=(),
        settings_option=None,
        tape=unused,
        profile=unused,
        later=None,
        estimate=estimate,
        roots=(),
        notes=(),
        margin="safe",
        call_sizes={},
    )


# Two ways to save what is needed; the first is predicted to be the faster one.
PROBLEM = problems.build(
    np.array([10, 100, 10]) * MIB, [option("checkpointing", 60, 0.010), option("tiled_tokens", 70, 0.020)]
)
LIMIT = 45 * MIB


class Traces(Candidates):
    """Traces that take, for each technique, the seconds that are given here."""

    def __init__(self, **seconds: float) -> None:
        self.seconds = seconds
        self.traced_choices: list[tuple[int, ...]] = []

    def with_solution(self, variant: Variant, solution: Solution) -> Candidate:
        self.traced_choices.append(solution.chosen)
        taken = [variant.problem.options[i].technique for i in solution.chosen]
        run = traced(0.1 + sum(self.seconds[name] for name in taken))
        return Candidate(run=run, variant=variant, solution=solution)

    def fits(self, run: TracedRun) -> bool:
        return True

    def first(self) -> Candidate:
        variant = Variant(run=traced(0.1), problem=PROBLEM, gap_bytes=0)
        found = self.with_solution(variant, solve(PROBLEM, LIMIT))
        return dataclasses.replace(found)


def test_a_prediction_that_holds_is_left_alone() -> None:
    traces = Traces(checkpointing=0.012, tiled_tokens=0.020)
    first = traces.first()
    assert not is_off(first)
    assert looked_again(first, traces) is first
    assert len(traces.traced_choices) == 1


def test_what_costs_much_more_than_predicted_is_replaced_by_what_is_faster() -> None:
    traces = Traces(checkpointing=0.035, tiled_tokens=0.020)
    first = traces.first()
    assert first.solution.chosen == (0,) and is_off(first)
    found = looked_again(first, traces)
    assert found.run.seconds == pytest.approx(0.12)
    assert not is_off(found)
    assert len(traces.traced_choices) == 2


def test_where_no_other_choice_is_faster_the_predicted_seconds_become_those_of_the_trace() -> None:
    traces = Traces(checkpointing=0.019, tiled_tokens=0.020)
    found = looked_again(traces.first(), traces)
    assert found.solution.chosen == (0,)
    assert predicted_seconds(found) == pytest.approx(found.run.seconds) == pytest.approx(0.119)
    assert len(traces.traced_choices) == 1


def test_a_slower_trace_is_not_taken_and_the_looks_end() -> None:
    traces = Traces(checkpointing=0.035, tiled_tokens=0.080)
    first = traces.first()
    assert looked_again(first, traces) is first
    assert len(traces.traced_choices) == 2
