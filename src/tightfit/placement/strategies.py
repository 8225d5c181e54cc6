"""From a problem to a solution, as good as the time allows.

In this order: the lower bound of the peak of live bytes, which may settle it at once; the greedy planners, which often suffice; the search, which
decides whether the capacity suffices; and, where it does not or none was given, searches for lower and lower heights.
"""

import dataclasses
import time

from tightfit.placement.board import Board
from tightfit.placement.branch_and_bound import Outcome
from tightfit.placement.buffers import Buffer, Crowd, PlacementProblem, worst_crowd
from tightfit.placement.greedy import ORDERS, greedy
from tightfit.placement.offsets import PlacementSolution, height_of
from tightfit.placement.restarts import place_below

_MAX_BUFFERS = 2000
"""Of one independent group: the tables of the search have the square of that many entries."""
_CAPACITY_SHARE = 0.8
"""The part of the time for the capacity itself; the rest improves the best height that is reported where the capacity was not reached."""
_TRY_SHARE = 0.25
"""The part of the remaining time that one height between the best and the bound may take."""


@dataclasses.dataclass(slots=True, kw_only=True)
class _Best:
    """The lowest placement so far, and the height in units below which there is none."""

    offsets: dict[str, int]
    height: int
    strategy: str
    unreachable: int

    def improve(self, problem: PlacementProblem, offsets: dict[str, int], strategy: str) -> None:
        height = height_of(problem, offsets)
        if height < self.height:
            self.offsets, self.height, self.strategy = offsets, height, strategy


def solve(problem: PlacementProblem, *, seconds: float = 60.0) -> PlacementSolution:
    """A placement within the capacity, or with no capacity the lowest one, found within `seconds`.

    Where it does not fit, the solution holds the lowest placement that was found, and says whether it is proven that none fits.
    """
    begin = time.monotonic()
    crowd = worst_crowd(problem)
    best = _greedy_best(problem, crowd, begin + seconds)
    capacity = problem.capacity
    is_infeasible = capacity is not None and crowd.num_bytes > capacity
    if capacity is None:
        _descend(problem, best, begin + seconds)
    elif not is_infeasible and best.height > capacity:
        # The search counts in units of the alignment.
        units = capacity // problem.alignment
        outcome = _attempt(problem, best, units, begin + seconds * _CAPACITY_SHARE)
        # Below a capacity that is no multiple of the alignment, the topmost buffer may use a part of a unit.
        is_infeasible = outcome is Outcome.EXHAUSTED and capacity % problem.alignment == 0
        if outcome is not Outcome.FOUND:
            best.unreachable = max(best.unreachable, units)
            _descend(problem, best, begin + seconds)
    # With an alignment the search counts in its multiples, so the last partial unit is not proven.
    is_lowest = problem.alignment == 1 and best.height <= best.unreachable + 1 and (capacity is None or is_infeasible)
    return PlacementSolution(
        offsets=best.offsets,
        height=best.height,
        crowd=crowd,
        fits=capacity is None or best.height <= capacity,
        is_proven_optimal=best.height == crowd.num_bytes or is_lowest,
        is_proven_infeasible=is_infeasible,
        strategy=best.strategy,
        seconds=time.monotonic() - begin,
    )


def _greedy_best(problem: PlacementProblem, crowd: Crowd, deadline: float) -> _Best:
    placements: dict[str, dict[str, int]] = {}
    for order in ORDERS:
        # One is made however long it takes: there is no answer without.
        if not placements or time.monotonic() < deadline:
            placements[order] = greedy(problem, order)
    order = min(placements, key=lambda name: height_of(problem, placements[name]))
    return _Best(
        offsets=placements[order],
        height=height_of(problem, placements[order]),
        strategy=f"greedy by {order}",
        unreachable=-(-crowd.num_bytes // problem.alignment) - 1,
    )


def _descend(problem: PlacementProblem, best: _Best, deadline: float) -> None:
    """Bisects heights between the bound and the best; after each one that was not decided in its share of the time, one nearer to the best."""
    # The bound itself first: it is reached more often than not, and then nothing is left to try.
    target = best.unreachable + 1
    while time.monotonic() < deadline:
        highest = -(-best.height // problem.alignment) - 1
        if target > highest:
            return
        share = (deadline - time.monotonic()) * _TRY_SHARE
        outcome = _attempt(problem, best, target, time.monotonic() + share)
        if outcome is Outcome.EXHAUSTED:
            best.unreachable = target
        low = best.unreachable if outcome is not Outcome.STOPPED else target
        highest = -(-best.height // problem.alignment) - 1
        target = max(best.unreachable + 1, (low + highest + 1) // 2)


def _attempt(problem: PlacementProblem, best: _Best, units: int, deadline: float) -> Outcome:
    """Searches for a placement below `units` times the alignment, group by group, and keeps it if it is better."""
    offsets = {buffer.name: 0 for buffer in problem.buffers}
    for group in _groups([buffer for buffer in problem.buffers if buffer.size]):
        # Left to the greedy planners: the tables of 2,000 buffers are 32 MB each.
        if len(group) > _MAX_BUFFERS:
            return Outcome.STOPPED
        outcome, found = place_below(Board.of(group, problem.alignment), units, deadline=deadline)
        if outcome is not Outcome.FOUND:
            return outcome
        offsets |= {buffer.name: int(offset) * problem.alignment for buffer, offset in zip(group, found, strict=True)}
    best.improve(problem, offsets, "branch and bound")
    return Outcome.FOUND


def _groups(buffers: list[Buffer]) -> list[list[Buffer]]:
    """The buffers in groups whose lifetimes do not overlap, the smallest group first."""
    groups: list[list[Buffer]] = []
    last_death = 0
    for buffer in sorted(buffers, key=lambda buffer: (buffer.lower, buffer.upper)):
        if groups and buffer.lower < last_death:
            groups[-1].append(buffer)
            last_death = max(last_death, buffer.upper)
        else:
            groups.append([buffer])
            last_death = buffer.upper
    return sorted(groups, key=len)
