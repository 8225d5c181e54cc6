"""A peak that some choice of options reaches, found at once: what is far above it needs no proof of the lowest one.

Greedy: at the highest time step the option that takes most from there is added, until none lowers the peak.
"""

import numpy as np

from tightfit.planner.problem import Problem


def reachable_peak(problem: Problem) -> int:
    """The peak in bytes of a choice that keeps to the conflicts and to the memory of other tiers; seldom the lowest one."""
    conflicts: dict[int, set[int]] = {index: {index} for index in range(len(problem.options))}
    for together in problem.conflicts:
        for index in together:
            conflicts[index].update(together)
    is_free = np.array([not (option.host_bytes or option.disk_bytes) for option in problem.options], dtype=bool)
    timeline = problem.base_bytes.copy()
    while is_free.any():
        at = int(timeline.argmax())
        found = int(np.where(is_free, problem.changes[:, at], 0).argmin())
        after = timeline + problem.changes[found]
        if after.max() >= timeline[at] or not is_free[found]:
            break
        timeline = after
        is_free[list(conflicts[found])] = False
    return int(timeline.max(initial=0))
