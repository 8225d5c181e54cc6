"""A plan depends on its problem, and on no clock: how far a search for it goes is counted in what the solver does."""

import itertools
import random
import time

import numpy as np
import pytest

from tightfit.planner import solve as solving
from tightfit.planner import solver_work
from tightfit.planner.option import Change, Option
from tightfit.planner.problem import Problem, build
from tightfit.planner.solution import validate
from tightfit.planner.solve import solve

_MIB = 1 << 20


def _many_knapsacks(num_options: int) -> Problem:
    """Options whose bytes and seconds have nothing in common: too many to try."""
    draw = random.Random(0)
    options = []
    for index in range(num_options):
        begin = draw.randrange(20, 36)
        num_bytes = -draw.randrange(1000, 5000) * 1000
        change = Change(begin=begin, end=begin + draw.randrange(12, 40), num_bytes=num_bytes)
        options.append(Option(
            technique="t", where=str(index), equivalence_class="", changes=(change,), seconds=-num_bytes * (1 + draw.random() / 50) * 1e-9,
            exact=True, slots=frozenset(),
        ))  # fmt: skip
    base = np.zeros(80, dtype=np.int64)
    base[30:46] = 300 * _MIB
    return build(base, options)


def test_a_search_that_is_broken_off_answers_the_same_on_a_machine_that_is_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = _many_knapsacks(120)
    budget = 240 * _MIB
    quick = solve(problem, budget, work_seconds=0.3)
    assert quick.fits and not quick.is_proven
    assert validate(problem, quick, budget) == []
    turns = 0

    def slow() -> float:
        nonlocal turns
        turns += 1
        # What other processes take away: the clock goes on, this one's processor time does not.
        time.sleep(0.003)
        return 0.0

    monkeypatch.setattr(solver_work.time, "thread_time", slow)
    # Asked again, it knows the answer, and has to search for it only with more work.
    assert solve(problem, budget, work_seconds=0.3) is quick and not turns
    solving._answers.clear()
    assert solve(problem, budget, work_seconds=0.3) == quick
    assert turns > 100


def test_a_search_that_counts_too_little_ends_by_the_processors_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solver_work, "_SECONDS_OF_A_TURN", 0.0)
    ticks = itertools.count(step=3)
    monkeypatch.setattr(solver_work.time, "thread_time", lambda: float(next(ticks)))
    assert solve(_many_knapsacks(120), 239 * _MIB, work_seconds=0.3).fits
    # For each program its limit and what it is over by, in steps of three seconds.
    assert next(ticks) < 3 * 12


def test_more_work_is_no_worse() -> None:
    problem, budget = _many_knapsacks(60), 240 * _MIB
    seconds = [solve(problem, budget, work_seconds=work, breaks_ties=False).seconds for work in (0.02, 0.2, 1.0)]
    assert seconds == sorted(seconds, reverse=True)
