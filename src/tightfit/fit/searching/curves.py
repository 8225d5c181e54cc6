"""The curve of a plan: the least seconds for a row of budgets, from the least that can be held to what the run holds as it is."""

from tightfit.fit.searching.variants import Variant
from tightfit.planner.plan import ParetoPoint
from tightfit.planner.solve import solve

NUM_POINTS = 8
_SECONDS_OF_A_POINT = 1.0


class Curves:
    """The curves of variants, each worked out once: while one of its runs is traced, as this process waits then, or else when it is asked for."""

    def __init__(self) -> None:
        self._made: list[tuple[Variant, tuple[ParetoPoint, ...]]] = []

    def of(self, variant: Variant) -> tuple[ParetoPoint, ...]:
        """The points of one variant, by rising bytes."""
        for known, points in self._made:
            if known is variant:
                return points
        points = tuple(_points(variant))
        self._made.append((variant, points))
        return points


def _points(variant: Variant) -> list[ParetoPoint]:
    problem = variant.problem
    if not problem.options:
        return []
    most = problem.peak_bytes(())
    low = solve(problem, 0, work_seconds=_SECONDS_OF_A_POINT).peak_bytes
    found: dict[tuple[int, ...], ParetoPoint] = {}
    for part in range(NUM_POINTS + 1):
        limit = low + (most - low) * part // NUM_POINTS
        solution = solve(problem, limit, work_seconds=_SECONDS_OF_A_POINT, breaks_ties=False)
        if solution.fits and solution.chosen not in found:
            found[solution.chosen] = ParetoPoint(
                device_bytes=solution.peak_bytes + variant.gap_bytes,
                seconds_per_step=variant.run.seconds + solution.seconds,
            )
    return list(found.values())
