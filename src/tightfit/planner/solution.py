"""The result of a solver, and a validator that recomputes all of it."""

import dataclasses

import numpy as np

from tightfit.planner.problem import Problem


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The options taken, by index, in order. `bound_seconds` is a lower bound of the added seconds; `is_proven`: the solution reaches it.

    `fits` is False where no choice is within the budget; the options taken are then those with the lowest peak.
    """

    chosen: tuple[int, ...]
    fits: bool
    seconds: float
    peak_bytes: int
    bound_seconds: float
    is_proven: bool


def validate(problem: Problem, solution: Solution, budget_bytes: int) -> list[str]:
    """A sentence for each claim of `solution` that does not hold; an empty list means a valid solution."""
    faults = []
    chosen = list(solution.chosen)
    if chosen != sorted(set(chosen)) or (chosen and not 0 <= chosen[0] <= chosen[-1] < len(problem.options)):
        return ["the chosen options are not distinct indices in order"]
    taken = set(chosen)
    faults += [
        f"more than one option is taken of {group}" for group in problem.conflicts if len(taken & set(group)) > 1
    ]
    for place, limit, sizes in problem.moved():
        moved = sum(sizes[index] for index in chosen)
        if moved > limit:
            faults.append(f"{moved:,} bytes are moved to {place}, which may take {limit:,}")
    timeline = problem.base_bytes.copy()
    for index in chosen:
        timeline += problem.changes[index]
    peak = int(timeline.max(initial=0))
    if peak != solution.peak_bytes:
        faults.append(f"the peak is {peak:,} bytes, not {solution.peak_bytes:,}")
    if solution.fits != (peak <= budget_bytes):
        faults.append(f"a peak of {peak:,} bytes is said to {'fit' if solution.fits else 'exceed'} {budget_bytes:,}")
    seconds = problem.seconds_of(chosen)
    # Sums of the same numbers in another order differ in the last digits.
    if not np.isclose(seconds, solution.seconds, rtol=1e-9, atol=1e-12):
        faults.append(f"the options add {seconds} s, not {solution.seconds} s")
    if solution.fits and solution.bound_seconds > solution.seconds + 1e-9:
        faults.append("the bound is above what was found")
    return faults
