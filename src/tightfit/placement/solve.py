"""From a problem to a solution: the greedy planners first."""

import time

from tightfit.placement.greedy import ORDERS, greedy
from tightfit.placement.problem import Problem, worst_crowd
from tightfit.placement.solution import Solution, height_of


def solve(problem: Problem, *, seconds: float = 60.0) -> Solution:
    """The lowest placement found within `seconds`."""
    begin = time.monotonic()
    crowd = worst_crowd(problem)
    candidates = {order: greedy(problem, order) for order in ORDERS}
    order = min(candidates, key=lambda name: height_of(problem, candidates[name]))
    height = height_of(problem, candidates[order])
    return Solution(
        offsets=candidates[order],
        height=height,
        crowd=crowd,
        fits=problem.capacity is None or height <= problem.capacity,
        is_proven_optimal=height == crowd.num_bytes,
        is_proven_infeasible=problem.capacity is not None and crowd.num_bytes > problem.capacity,
        strategy=f"greedy by {order}",
        seconds=time.monotonic() - begin,
    )
