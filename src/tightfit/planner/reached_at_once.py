"""Whether a peak can be reached, where that is seen at once: most budgets are far above the lowest peak, whose proof takes a solver a second or more.

Greedy: the option is added that takes most of what is above the limit, over all time steps, until nothing is or none takes any.
"""

import numpy as np

from tightfit.planner.problem import Problem


def is_reached_at_once(problem: Problem, limit_bytes: int) -> bool:
    """Whether a choice that keeps to the conflicts, and moves nothing to other tiers, has a peak of at most `limit_bytes`; a no is no proof."""
    conflicts: dict[int, set[int]] = {index: {index} for index in range(len(problem.options))}
    for together in problem.conflicts:
        for index in together:
            conflicts[index].update(together)
    is_free = np.array([not (option.host_bytes or option.disk_bytes) for option in problem.options], dtype=bool)
    timeline = problem.base_bytes.copy()
    while timeline.max(initial=0) > limit_bytes:
        free = np.flatnonzero(is_free)
        excess = np.maximum(timeline + problem.changes[free] - limit_bytes, 0).sum(axis=1)
        if not len(free) or excess.min() >= np.maximum(timeline - limit_bytes, 0).sum():
            return False
        found = int(free[excess.argmin()])
        timeline = timeline + problem.changes[found]
        is_free[list(conflicts[found])] = False
    return True
