"""Solves a problem exactly: a mixed-integer linear program with a binary variable per option and a row per time step, solved by HiGHS.

Programs, one after the other: the least seconds within the budget; of all choices that take no longer, the least bytes moved to another tier, where
any are; of those the one with the lowest peak. So the result does not depend on how the solver breaks ties, and a smaller budget never yields a larger peak. If nothing fits, the lowest peak is
minimised alone. The accelerations can be switched off one by one (`Tricks`).

HiGHS: Huangfu and Hall, "Parallelizing the dual revised simplex method" (2018); it is imported here alone.
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tightfit.errors import MissingExtra
from tightfit.planner.order_rows import FREE, Row, order_rows
from tightfit.planner.problem import Problem
from tightfit.planner.sides import Sides
from tightfit.planner.silenced import made_silently
from tightfit.planner.solution import Solution
from tightfit.planner.solver_work import SolverWork

_NEXT_TO_NOTHING = 1e-3
_MIB = float(1 << 20)
# The relative gap of HiGHS (mip_rel_gap): the options' seconds are not known any more precisely.
_GAP = 1e-4
# The second program only breaks ties. Those are rare where blocks differ, and then it is the harder one of the two.
_SECONDS_TO_TIDY = 0.3
# The solver's variables are integral only up to mip_feasibility_tolerance (1e-6), so a choice rounded to integers can exceed the budget. It is
# then solved again with this much less.
_SLACKS_MIB = (0.0, 1e-3, 1.0)
_TOLERANCE_MIB = 1e-4
# Adding some rows at a time keeps both the programs small and the rounds few.
_NUM_FIRST_MOMENTS = 16
_NUM_MORE_MOMENTS = 16
_MAX_ROUNDS_RELAXED = 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tricks:
    """Accelerations of the search. None changes the optimum; each can be turned off to measure its effect.

    `order_alike`: symmetry breaking among equivalent places (`order_rows`): an earlier one never saves less than a later one, whose activations have shorter
    lifetimes. Without it the solver proves the same for every permutation of the blocks of a deep model.
    `add_rows_when_broken`: lazy constraints: a time step gets a row only when a solution violates its limit, and most never do.
    """

    order_alike: bool = True
    add_rows_when_broken: bool = True


_Key = tuple[Hashable, ...]
_answers: OrderedDict[_Key, "Solution | _Found"] = OrderedDict()
"""Those to the latest problems: a search comes to the same ones again, with the same limits."""
_MAX_ANSWERS = 256


def solve(
    problem: Problem,
    budget_bytes: int,
    *,
    work_seconds: float = 10.0,
    breaks_ties: bool = True,
    tricks: Tricks | None = None,
) -> Solution:
    """The fastest choice of options whose peak is at most `budget_bytes`, or the one with the lowest peak if there is none.

    Of choices that are equally fast it is the one that moves least to other tiers, then the one with the lowest peak, or, without `breaks_ties`, any. After work of about `work_seconds`, which no
    clock counts, the best choice so far is returned, with `is_proven` False and the bound reached.

    Raises:
        MissingExtra: highspy is not installed.
    """
    if not problem.options:
        return _solution(problem, (), budget_bytes, bound_seconds=0.0, is_proven=True)
    tricks = tricks or Tricks()
    key = ("fastest", budget_bytes, breaks_ties, tricks, _content(problem))
    known = _known(key, work_seconds)
    if isinstance(known, Solution):
        return known
    solution = _solved(problem, budget_bytes, work_seconds, tricks, breaks_ties=breaks_ties)
    _remember(key, work_seconds, solution)
    return solution


def _solved(problem: Problem, budget_bytes: int, work_seconds: float, tricks: Tricks, *, breaks_ties: bool) -> Solution:
    work = SolverWork(work_seconds)
    rows = [*_conflict_rows(problem), *(order_rows(problem) if tricks.order_alike else ())]
    # Nearly always the first is enough.
    for slack_mib in _SLACKS_MIB:
        fast = _Program(problem, rows, tricks)
        found = fast.run(work, max_mib=budget_bytes / _MIB - slack_mib, is_for_time=True)
        if found is None or problem.peak_bytes(found.chosen) <= budget_bytes:
            break
    if found is None or problem.peak_bytes(found.chosen) > budget_bytes:
        # With work of its own: the first program may have used up its limit without an answer.
        least = _least(problem, rows, tricks, SolverWork(work_seconds))
        # One that fits shows that the first program was not solved, and not that there is no faster one.
        is_proven = least.is_proven and problem.peak_bytes(least.chosen) > budget_bytes
        return _solution(
            problem, least.chosen, budget_bytes, bound_seconds=_with_all_that_saves(problem), is_proven=is_proven
        )
    if not breaks_ties:
        return _solution(problem, found.chosen, budget_bytes, bound_seconds=found.bound, is_proven=found.is_proven)
    chosen = _of_the_fastest(problem, found.chosen, budget_bytes, rows, tricks, work)
    return _solution(problem, chosen, budget_bytes, bound_seconds=found.bound, is_proven=found.is_proven)


def _of_the_fastest(
    problem: Problem,
    chosen: tuple[int, ...],
    budget_bytes: int,
    rows: Sequence[Row],
    tricks: Tricks,
    work: SolverWork,
) -> tuple[int, ...]:
    """Of the choices that take no longer than `chosen`, which fits, the one that moves least to other tiers, and of those the one with the lowest peak."""
    rows, max_mib = [*rows, *_rows_as_fast(problem, chosen)], budget_bytes / _MIB
    if problem.moved_bytes(chosen):
        # What is moved for no gain is one more thing that can go wrong.
        side = _moved_side(problem)
        moving = _Program(problem, rows, tricks, sides=[side])
        tidy = moving.run(work.part(_SECONDS_TO_TIDY), max_mib=max_mib, is_for_time=True)
        chosen = _better(problem, tidy, chosen, budget_bytes)
        rows.append(Row(-FREE, problem.moved_bytes(chosen) / _MIB + _TOLERANCE_MIB, side.weights))
    smallest = _Program(problem, rows, tricks)
    tidy = smallest.run(work.part(_SECONDS_TO_TIDY), max_mib=max_mib)
    return _better(problem, tidy, chosen, budget_bytes)


def least(problem: Problem, *, work_seconds: float = 10.0) -> Solution:
    """The choice with the lowest peak, and of those that hold next to nothing more the fastest that is found in time.

    The allocator's blocks and segments differ by more than that, and what is taken besides often leaves it with fewer of them.
    """
    if not problem.options:
        return _solution(problem, (), problem.peak_bytes(()), bound_seconds=0.0, is_proven=True)
    rows = [*_conflict_rows(problem), *order_rows(problem)]
    found = _least(problem, rows, Tricks(), SolverWork(work_seconds))
    peak = problem.peak_bytes(found.chosen)
    fastest = solve(problem, round(peak * (1 + _NEXT_TO_NOTHING)), work_seconds=work_seconds)
    return fastest if fastest.fits else _solution(problem, found.chosen, peak, bound_seconds=0.0, is_proven=False)


def least_peak(problem: Problem, *, work_seconds: float = 10.0) -> int:
    """The lowest peak in bytes of any choice, as far as it is found in time."""
    if not problem.options:
        return problem.peak_bytes(())
    rows = [*_conflict_rows(problem), *order_rows(problem)]
    return problem.peak_bytes(_least(problem, rows, Tricks(), SolverWork(work_seconds)).chosen)


@dataclasses.dataclass(frozen=True, slots=True)
class _Found:
    chosen: tuple[int, ...]
    bound: float
    is_proven: bool


class _Program:
    """Rows and columns for HiGHS: the peak in MiB is a column that is minimised, or the milliseconds of a step, where either side can be the slower one."""

    def __init__(
        self,
        problem: Problem,
        rows: Sequence[Row],
        tricks: Tricks,
        *,
        seen: _Found | None = None,
        sides: "Sequence[_Side] | None" = None,
    ) -> None:
        """`sides`: what is minimised instead of the seconds."""
        self.problem = problem
        self._seen = seen
        self.rows = list(rows)
        self._sides = sides or _slower_sides(problem)
        # The highest time steps of the plain run are the most likely to bind.
        order = np.argsort(-problem.base_bytes, kind="stable")
        self._adds_rows = tricks.add_rows_when_broken
        self._moments = order[:_NUM_FIRST_MOMENTS].tolist() if self._adds_rows else order.tolist()

    def run(self, work: SolverWork, *, max_mib: float | None = None, is_for_time: bool = False) -> _Found | None:
        """The choice with the lowest peak, or the fastest if it `is_for_time`; None where there is none, or none was found in time.

        With a choice that was `seen` before, the one with the lowest peak that was found in time is returned, and never None.
        """
        if self._adds_rows:
            self._add_rows_of_relaxed(work, max_mib, is_for_time=is_for_time)
        while True:
            found, peak_mib = self._run(work, max_mib, is_for_time=is_for_time)
            if found is None:
                return self._seen
            self._see(found)
            ceiling = max_mib if is_for_time else peak_mib
            assert ceiling is not None
            if not self._add_broken(self.problem.timeline(found.chosen) / _MIB, ceiling):
                return found if self._seen is None or found.is_proven else self._seen
            if work.is_over:
                return self._seen

    def _add_rows_of_relaxed(self, work: SolverWork, max_mib: float | None, *, is_for_time: bool) -> None:
        """Adds rows for the time steps that the solution of the linear relaxation violates, until it violates none.

        A round of it takes a tenth of one of the integer program, which then needs one or two rounds for most problems.
        """
        problem, num_options = self.problem, len(self.problem.options)
        for _ in range(_MAX_ROUNDS_RELAXED):
            solver = self._solver(max_mib, is_for_time=is_for_time, is_relaxed=True)
            work.run(solver)
            if not _is_feasible(solver) or work.is_over:
                return
            values = np.array(solver.getSolution().col_value)
            ceiling = max_mib if is_for_time else float(values[-1])
            assert ceiling is not None
            if not self._add_broken((problem.base_bytes + values[:num_options] @ problem.changes) / _MIB, ceiling):
                return

    def _add_broken(self, timeline: npt.NDArray[np.float64], ceiling: float) -> bool:
        """Adds rows for the highest time steps above the ceiling, in MiB; False if there is none."""
        # Time steps that have a row are satisfied by the solver, up to its tolerance.
        timeline[self._moments] = -np.inf
        broken = np.argsort(-timeline, kind="stable")[:_NUM_MORE_MOMENTS]
        broken = broken[timeline[broken] > ceiling + _TOLERANCE_MIB]
        self._moments += broken.tolist()
        return len(broken) > 0

    def _see(self, found: _Found) -> None:
        seen, peak = self._seen, self.problem.peak_bytes
        # Also where time steps are broken that have no row yet: the choice is one, with the peak that it has.
        if seen is not None and peak(found.chosen) < peak(seen.chosen):
            self._seen = dataclasses.replace(found, is_proven=False)

    def _limits(self, max_mib: float | None, *, is_for_time: bool) -> list[Row]:
        """A row for each time step considered: its bytes are at most `max_mib`, or at most the peak. Where time is a column, a row for each side."""
        problem, peak = self.problem, len(self.problem.options)
        rows = []
        for at in self._moments:
            weights, base_mib = _weights(problem.changes[:, at]), int(problem.base_bytes[at]) / _MIB
            if not is_for_time:
                rows.append(Row(-FREE, -base_mib, weights | {peak: -1.0}))
            elif max_mib is not None:
                rows.append(Row(-FREE, max_mib - base_mib, weights))
        if not is_for_time and max_mib is not None:
            rows.append(Row(-FREE, max_mib, {peak: 1.0}))
        if is_for_time and len(self._sides) > 1:
            rows += [Row(-FREE, side.spare, side.weights | {peak: -1.0}) for side in self._sides]
        return rows

    def _run(self, work: SolverWork, max_mib: float | None, *, is_for_time: bool) -> tuple[_Found | None, float]:
        import highspy

        solver = self._solver(max_mib, is_for_time=is_for_time)
        work.run(solver)
        if not _is_feasible(solver):
            return None, 0.0
        info = solver.getInfo()
        values = solver.getSolution().col_value
        found = _Found(
            chosen=tuple(index for index, value in enumerate(values[: len(self.problem.options)]) if value > 0.5),
            bound=float(info.mip_dual_bound) * 1e-3,
            is_proven=solver.getModelStatus() == highspy.HighsModelStatus.kOptimal,
        )
        return found, 0.0 if is_for_time else values[-1]

    def _solver(self, max_mib: float | None, *, is_for_time: bool, is_relaxed: bool = False) -> Any:
        """HiGHS with the program; `is_relaxed`: options may be taken in part."""
        try:
            import highspy
        except ModuleNotFoundError as error:
            raise MissingExtra(
                "planning needs the solver HiGHS, which is not installed here: pip install highspy"
            ) from error
        rows = [*self.rows, *self._limits(max_mib, is_for_time=is_for_time)]
        num_options, has_more = len(self.problem.options), not is_for_time or len(self._sides) > 1
        costs = np.append(np.zeros(num_options), [1.0] * has_more)
        if not has_more:
            for index, milliseconds in self._sides[0].weights.items():
                costs[index] = milliseconds
        program = highspy.HighsLp()
        program.num_col_, program.num_row_ = num_options + has_more, len(rows)
        # Milliseconds and MiB, so that coefficients lie near 1: HiGHS compares with absolute tolerances.
        program.col_cost_ = costs
        # What is added to a step may be less than nothing.
        program.col_lower_ = np.append(np.zeros(num_options), [-FREE if is_for_time else 0.0] * has_more)
        program.col_upper_ = np.append(np.ones(num_options), [FREE] * has_more)
        program.row_lower_ = np.array([row.low for row in rows])
        program.row_upper_ = np.array([row.high for row in rows])
        program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        program.a_matrix_.start_ = np.cumsum([0, *(len(row.weights) for row in rows)])
        program.a_matrix_.index_ = np.array([i for row in rows for i in row.weights], dtype=np.int32)
        program.a_matrix_.value_ = np.array([w for row in rows for w in row.weights.values()], dtype=np.float64)
        if not is_relaxed:
            integer, real = highspy.HighsVarType.kInteger, highspy.HighsVarType.kContinuous
            program.integrality_ = [integer] * num_options + [real] * has_more
        solver = made_silently(highspy.Highs)
        solver.silent()
        # One thread and a fixed seed make the search deterministic: the same problem gives the same plan.
        for name, value in (("threads", 1), ("mip_rel_gap", _GAP), ("mip_abs_gap", 1e-6), ("random_seed", 0)):
            solver.setOptionValue(name, value)
        # Restarts of the root node cost more than they bring, most of all for equivalent blocks: 96 of them took 1.7 s without and 2.4 s
        # with restarts (docs/log.md, "The planner beside half the batch").
        solver.setOptionValue("mip_allow_restart", False)
        solver.passModel(program)
        return solver


def _is_feasible(solver: Any) -> bool:
    import highspy

    return bool(solver.getInfo().primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible)


def _least(problem: Problem, rows: Sequence[Row], tricks: Tricks, work: SolverWork) -> _Found:
    """The choice with the lowest peak, or, where it is not found in time, the best of those that were."""
    key = ("least", tricks, _content(problem))
    seconds = work.seconds_left
    known = _known(key, seconds)
    if isinstance(known, _Found):
        return known
    nothing = _Found(chosen=(), bound=0.0, is_proven=False)
    found = _Program(problem, rows, tricks, seen=nothing).run(work)
    assert found is not None
    _remember(key, seconds, found)
    return found


def _content(problem: Problem) -> Hashable:
    """All of a problem that a solution depends on."""
    arrays = (problem.base_bytes, problem.changes, problem.sides())
    options = (
        (
            o.where,
            o.equivalence_class,
            o.slots,
            o.host_bytes,
            o.disk_bytes,
            min((c.begin for c in o.changes), default=-1),
        )
        for o in problem.options
    )
    return (
        *((array.shape, array.tobytes()) for array in arrays),
        tuple(options),
        problem.conflicts,
        problem.host_bytes,
        problem.disk_bytes,
        problem.step,
    )


def _known(key: _Key, work_seconds: float) -> "Solution | _Found | None":
    """What is proven, or what came of as much work before: it would again."""
    return _answers.get(key) or _answers.get((*key, work_seconds))


def _remember(key: _Key, work_seconds: float, answer: "Solution | _Found") -> None:
    _answers[key if answer.is_proven else (*key, work_seconds)] = answer
    if len(_answers) > _MAX_ANSWERS:
        _answers.popitem(last=False)


def _conflict_rows(problem: Problem) -> list[Row]:
    """At most one option of each conflict, and no more bytes moved to another tier than it can hold."""
    rows = [Row(-FREE, 1.0, dict.fromkeys(group, 1.0)) for group in problem.conflicts]
    for _, limit, sizes in problem.moved():
        weights = {index: size / _MIB for index, size in enumerate(sizes) if size}
        if weights:
            rows.append(Row(-FREE, limit / _MIB, weights))
    return rows


def _weights(column: npt.NDArray[np.int64]) -> dict[int, float]:
    return {int(i): float(column[i]) / _MIB for i in np.flatnonzero(column)}


@dataclasses.dataclass(frozen=True, slots=True)
class _Side:
    """A side that a step may wait for: the milliseconds that it has to `spare`, and those that each option adds to it."""

    spare: float
    weights: dict[int, float]


def _slower_sides(problem: Problem) -> list[_Side]:
    """The sides that can be the slower one with some choice; the other one's options are as good as free."""
    plain = np.array([problem.step.on_card, problem.step.on_host])
    added = problem.sides()
    kept = []
    for one, other in ((0, 1), (1, 0)):
        most, least = plain[one] + np.maximum(added[one], 0).sum(), plain[other] + np.minimum(added[other], 0).sum()
        is_below = plain[one] <= plain[other] and bool((added[one] <= added[other]).all())
        # Of two that are always alike the first stays.
        is_alike = is_below and one == 0 and plain[one] == plain[other] and bool((added[one] == added[other]).all())
        if (most > least and not is_below) or is_alike:
            kept.append(one)
    return [
        _Side(
            spare=float(plain.max() - plain[side]) * 1e3,
            weights={i: float(s) * 1e3 for i, s in enumerate(added[side]) if s},
        )
        for side in kept or [int(plain.argmax())]
    ]


def _with_all_that_saves(problem: Problem) -> float:
    """What a step takes longer with all that saves time on either side, and nothing else: no choice takes less."""
    on_card, on_host = np.minimum(problem.sides(), 0.0).sum(axis=1).tolist()
    return problem.step.added(Sides(on_card=on_card, on_host=on_host))


def _rows_as_fast(problem: Problem, chosen: Sequence[int]) -> list[Row]:
    """No longer than with `chosen`, plus a tolerance for floating point."""
    added = problem.seconds_of(chosen) * 1e3 + 1e-6
    return [Row(-FREE, side.spare + added, side.weights) for side in _slower_sides(problem)]


def _moved_side(problem: Problem) -> _Side:
    """The MiB that each option moves to other tiers, in the place of what it adds to a step."""
    moved = ((i, o.host_bytes + o.disk_bytes) for i, o in enumerate(problem.options))
    return _Side(spare=0.0, weights={i: num_bytes / _MIB for i, num_bytes in moved if num_bytes})


def _better(problem: Problem, tidy: _Found | None, chosen: tuple[int, ...], budget_bytes: int) -> tuple[int, ...]:
    """`tidy`, or `chosen`, which fits, where that is no worse."""
    if tidy is None or problem.peak_bytes(tidy.chosen) > budget_bytes:
        return chosen
    return min((tidy.chosen, chosen), key=lambda each: _rank(problem, each))


def _rank(problem: Problem, chosen: Sequence[int]) -> tuple[int, int, int]:
    return problem.moved_bytes(chosen), problem.peak_bytes(chosen), len(chosen)


def _solution(
    problem: Problem, chosen: Sequence[int], budget_bytes: int, *, bound_seconds: float, is_proven: bool
) -> Solution:
    seconds, peak = problem.seconds_of(chosen), problem.peak_bytes(chosen)
    return Solution(
        chosen=tuple(sorted(chosen)),
        fits=peak <= budget_bytes,
        seconds=seconds,
        peak_bytes=peak,
        bound_seconds=min(bound_seconds, seconds),
        is_proven=is_proven,
    )
