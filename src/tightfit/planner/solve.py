"""Solves a problem exactly: a mixed-integer linear program with a binary for each option and a row for each moment, given to HiGHS.

Two programs, one after the other: the least seconds within the budget, then, of all choices that take no longer, the one that holds least. So
the answer does not depend on how the solver breaks ties, and a smaller budget never yields a larger peak. If nothing fits, the first program
is the least that can be held. Tricks are switches of their own, with their reasons (`Tricks`).

HiGHS: Huangfu and Hall, "Parallelizing the dual revised simplex method" (2018); it is imported here alone.
"""

import dataclasses
import itertools
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tightfit.errors import MissingExtra
from tightfit.planner.problem import Problem
from tightfit.planner.solution import Solution

_MIB = float(1 << 20)
_FREE = 1e30
# What the options promise is not known any better than this share.
_GAP = 1e-4
# Ties are rare where blocks differ, and then the second program is the harder one.
_SECONDS_TO_TIDY = 0.3
# Rows are exact for choices that are whole, and a solver's are whole to a tolerance: an answer that turns out too large is asked for again with
# this much less room.
_SLACKS_MIB = (0.0, 1e-3, 1.0)
_TOLERANCE_MIB = 1e-4
_NUM_FIRST_MOMENTS = 16
_NUM_MORE_MOMENTS = 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tricks:
    """What makes the search fast. None changes the answer's quality; each can be turned off to see what it is worth.

    `order_alike`: places that differ by their position alone are counted, not listed: an earlier one never saves less than a later one, whose
    activations live for a shorter time. Without it a solver proves the same thing for every permutation of the blocks of a deep model.
    `add_rows_when_broken`: a moment gets a row when an answer has broken its limit, and most never do. Without it every moment has one.
    """

    order_alike: bool = True
    add_rows_when_broken: bool = True


def solve(
    problem: Problem, budget_bytes: int, *, time_limit_seconds: float = 10.0, tricks: Tricks | None = None
) -> Solution:
    """The fastest choice of options whose peak is at most `budget_bytes`, or the one that holds least if there is none.

    After `time_limit_seconds` the best choice so far is returned, with `is_proven` False and the bound that was reached.

    Raises:
        MissingExtra: highspy is not installed.
    """
    if not problem.options:
        return _solution(problem, (), budget_bytes, bound_seconds=0.0, is_proven=True)
    tricks = tricks or Tricks()
    deadline = time.monotonic() + time_limit_seconds
    rows = [*_conflict_rows(problem), *(_order_rows(problem) if tricks.order_alike else ())]
    for slack_mib in _SLACKS_MIB:
        fast = _Program(problem, rows, tricks)
        found = fast.run(problem.seconds, deadline, most_mib=budget_bytes / _MIB - slack_mib)
        if found is None or problem.peak_bytes(found.chosen) <= budget_bytes:
            break
    if found is None or problem.peak_bytes(found.chosen) > budget_bytes:
        least = _least(problem, rows, tricks, deadline + time_limit_seconds)
        return _solution(problem, least.chosen, budget_bytes, bound_seconds=0.0, is_proven=least.is_proven)
    smallest = _Program(problem, [*rows, _Row(-_FREE, _time(problem, found.chosen), _all(problem))], tricks)
    tidy = smallest.run(None, min(deadline, time.monotonic() + _SECONDS_TO_TIDY), most_mib=budget_bytes / _MIB)
    chosen = found.chosen if tidy is None else min((tidy.chosen, found.chosen), key=lambda c: _rank(problem, c))
    return _solution(problem, chosen, budget_bytes, bound_seconds=found.bound, is_proven=found.is_proven)


def least(problem: Problem, *, time_limit_seconds: float = 10.0) -> Solution:
    """The choice that holds least, and of these the fastest that the time allows to find."""
    if not problem.options:
        return _solution(problem, (), problem.peak_bytes(()), bound_seconds=0.0, is_proven=True)
    rows = [*_conflict_rows(problem), *_order_rows(problem)]
    found = _least(problem, rows, Tricks(), time.monotonic() + time_limit_seconds)
    peak = problem.peak_bytes(found.chosen)
    fastest = solve(problem, peak, time_limit_seconds=time_limit_seconds)
    return fastest if fastest.fits else _solution(problem, found.chosen, peak, bound_seconds=0.0, is_proven=False)


@dataclasses.dataclass(frozen=True, slots=True)
class _Row:
    """`low` <= the sum of `weights` times the options <= `high`."""

    low: float
    high: float
    weights: dict[int, float]


@dataclasses.dataclass(frozen=True, slots=True)
class _Found:
    chosen: tuple[int, ...]
    bound: float
    is_proven: bool


class _Program:
    """Rows and columns for HiGHS. Without costs there is one column more, the peak in MiB, and that is minimised."""

    def __init__(self, problem: Problem, rows: Sequence[_Row], tricks: Tricks) -> None:
        self.problem = problem
        self.rows = list(rows)
        order = np.argsort(-problem.base_bytes, kind="stable")
        self._moments = order[:_NUM_FIRST_MOMENTS].tolist() if tricks.add_rows_when_broken else order.tolist()

    def run(
        self, costs: npt.NDArray[np.float64] | None, deadline: float, *, most_mib: float | None = None
    ) -> _Found | None:
        """The cheapest choice by `costs`, or by the peak without; None where there is none, or none was found in time."""
        while True:
            found, peak_mib = self._run(costs, deadline, most_mib)
            if found is None:
                return None
            levels = self.problem.levels(found.chosen) / _MIB
            ceiling = peak_mib if costs is None else most_mib
            assert ceiling is not None
            levels[self._moments] = -np.inf
            broken = np.argsort(-levels, kind="stable")[:_NUM_MORE_MOMENTS]
            broken = broken[levels[broken] > ceiling + _TOLERANCE_MIB]
            if not len(broken):
                return found
            if time.monotonic() > deadline:
                return None
            self._moments += broken.tolist()

    def _limits(self, costs: npt.NDArray[np.float64] | None, most_mib: float | None) -> list[_Row]:
        """A row for each moment that counts: it holds at most `most_mib`, or at most the peak."""
        problem, peak = self.problem, len(self.problem.options)
        rows = []
        for at in self._moments:
            weights, base_mib = _weights(problem.changes[:, at]), int(problem.base_bytes[at]) / _MIB
            if costs is None:
                rows.append(_Row(-_FREE, -base_mib, weights | {peak: -1.0}))
            elif most_mib is not None:
                rows.append(_Row(-_FREE, most_mib - base_mib, weights))
        if costs is None and most_mib is not None:
            rows.append(_Row(-_FREE, most_mib, {peak: 1.0}))
        return rows

    def _run(
        self, costs: npt.NDArray[np.float64] | None, deadline: float, most_mib: float | None
    ) -> tuple[_Found | None, float]:
        try:
            import highspy
        except ModuleNotFoundError as error:
            raise MissingExtra(
                "planning needs the solver HiGHS, which is not installed here: pip install highspy"
            ) from error
        rows = [*self.rows, *self._limits(costs, most_mib)]
        num_options, has_peak = len(self.problem.options), costs is None
        program = highspy.HighsLp()
        program.num_col_, program.num_row_ = num_options + has_peak, len(rows)
        program.col_cost_ = np.append(np.zeros(num_options), 1.0) if costs is None else costs * 1e3
        program.col_lower_ = np.zeros(num_options + has_peak)
        program.col_upper_ = np.append(np.ones(num_options), [_FREE] * has_peak)
        program.row_lower_ = np.array([row.low for row in rows])
        program.row_upper_ = np.array([row.high for row in rows])
        program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        program.a_matrix_.start_ = np.cumsum([0, *(len(row.weights) for row in rows)])
        program.a_matrix_.index_ = np.array([i for row in rows for i in row.weights], dtype=np.int32)
        program.a_matrix_.value_ = np.array([w for row in rows for w in row.weights.values()], dtype=np.float64)
        integer, real = highspy.HighsVarType.kInteger, highspy.HighsVarType.kContinuous
        program.integrality_ = [integer] * num_options + [real] * has_peak
        solver = highspy.Highs()
        solver.silent()
        for name, value in (("threads", 1), ("mip_rel_gap", _GAP), ("mip_abs_gap", 1e-6), ("random_seed", 0)):
            solver.setOptionValue(name, value)
        # Beginning anew with what the root has fixed costs more than it brings, for blocks that are alike most of all.
        solver.setOptionValue("mip_allow_restart", False)
        solver.setOptionValue("time_limit", max(0.05, deadline - time.monotonic()))
        solver.passModel(program)
        solver.run()
        info = solver.getInfo()
        if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return None, 0.0
        values = solver.getSolution().col_value
        found = _Found(
            chosen=tuple(index for index, value in enumerate(values[:num_options]) if value > 0.5),
            bound=float(info.mip_dual_bound) * 1e-3,
            is_proven=solver.getModelStatus() == highspy.HighsModelStatus.kOptimal,
        )
        return found, values[-1] if has_peak else 0.0


def _least(problem: Problem, rows: Sequence[_Row], tricks: Tricks, deadline: float) -> _Found:
    found = _Program(problem, rows, tricks).run(None, deadline)
    return found or _Found(chosen=(), bound=0.0, is_proven=False)


def _conflict_rows(problem: Problem) -> list[_Row]:
    """At most one of each conflict, and no more moved elsewhere than there is room for."""
    rows = [_Row(-_FREE, 1.0, dict.fromkeys(group, 1.0)) for group in problem.conflicts]
    for _, limit, sizes in problem.moved():
        weights = {index: size / _MIB for index, size in enumerate(sizes) if size}
        if weights:
            rows.append(_Row(-_FREE, limit / _MIB, weights))
    return rows


def _order_rows(problem: Problem) -> list[_Row]:
    """For neighbours among places that are alike: what saves at least so much is taken at the earlier one if it is at the later one.

    An option of something around the earlier place counts there too, since it leaves no choice inside.
    """
    saved = -problem.changes.min(axis=1)
    places: dict[str, list[int]] = {}
    for index, option in enumerate(problem.options):
        if option.alike and option.changes:
            places.setdefault(option.where, []).append(index)
    alike: dict[tuple[tuple[str, int], ...], list[list[int]]] = {}
    for members in places.values():
        kind = tuple(sorted((problem.options[i].alike, int(saved[i])) for i in members))
        alike.setdefault(kind, []).append(members)
    rows = []
    for group in alike.values():
        group.sort(key=lambda members: min(c.begin for c in problem.options[members[0]].changes))
        for earlier, later in itertools.pairwise(group):
            around = _around(problem, earlier)
            for level in {int(saved[i]) for i in later}:
                weights = {i: 1.0 for i in (*earlier, *around) if saved[i] >= level}
                weights |= {i: -1.0 for i in later if saved[i] >= level}
                rows.append(_Row(0.0, _FREE, weights))
    return rows


def _around(problem: Problem, members: Sequence[int]) -> list[int]:
    slots = problem.options[members[0]].slots
    return [i for i, option in enumerate(problem.options) if option.slots > slots]


def _weights(column: npt.NDArray[np.int64]) -> dict[int, float]:
    return {int(i): float(column[i]) / _MIB for i in np.flatnonzero(column)}


def _all(problem: Problem) -> dict[int, float]:
    return {i: float(s) * 1e3 for i, s in enumerate(problem.seconds) if s}


def _time(problem: Problem, chosen: Sequence[int]) -> float:
    """Milliseconds that `chosen` add, and as little more as floating point needs."""
    return float(problem.seconds[list(chosen)].sum()) * 1e3 + 1e-6


def _rank(problem: Problem, chosen: Sequence[int]) -> tuple[int, int]:
    return problem.peak_bytes(chosen), len(chosen)


def _solution(
    problem: Problem, chosen: Sequence[int], budget_bytes: int, *, bound_seconds: float, is_proven: bool
) -> Solution:
    seconds, peak = float(problem.seconds[list(chosen)].sum()), problem.peak_bytes(chosen)
    return Solution(
        chosen=tuple(sorted(chosen)),
        fits=peak <= budget_bytes,
        seconds=seconds,
        peak_bytes=peak,
        bound_seconds=min(bound_seconds, seconds),
        is_proven=is_proven,
    )
