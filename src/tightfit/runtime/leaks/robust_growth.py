"""Decides whether a series of bytes at the ends of steps grows, and by how much per step.

The first steps are left out (optimizer states, caches that fill), and of the rest the *floor* is looked at: the level that the series never falls below
again. A buffer that is emptied now and then returns to its floor; a leak does not. Slopes are medians (Theil-Sen), so that single steps decide nothing.
"""

import itertools
import statistics
from collections.abc import Sequence

NUM_WARM_UP = 2
MIN_STEPS = 6
"""Ends of steps that are needed: two of warm-up, and four to see three rises."""
_MIN_RISES = 3
# One jump that is most of the growth is a model or a cache that was made late.
_MAX_SHARE_OF_ONE_RISE = 0.6
# What has nearly stopped growing was filling.
_MIN_SHARE_OF_LATE_GROWTH = 0.4
# Pairs of this many points are looked at, a few thousand.
_MAX_POINTS = 64


def growth_per_step(values: Sequence[float], *, per_value: float = 1.0) -> float:
    """How much `values` grow per step, 0.0 where they do not, or there are fewer than `MIN_STEPS`; `per_value` steps lie between two of them."""
    if len(values) < MIN_STEPS:
        return 0.0
    kept = list(values)[max(NUM_WARM_UP, len(values) // 5) :]
    floor = list(itertools.accumulate(reversed(kept), min))[::-1]
    total = floor[-1] - floor[0]
    rises = [later - earlier for earlier, later in itertools.pairwise(floor) if later > earlier]
    if total <= 0 or len(rises) < _MIN_RISES or max(rises) > _MAX_SHARE_OF_ONE_RISE * total:
        return 0.0
    middle = len(floor) // 2
    late = (floor[-1] - floor[middle]) / (len(floor) - 1 - middle)
    slope = _median_slope(floor)
    if slope <= 0 or late < _MIN_SHARE_OF_LATE_GROWTH * total / (len(floor) - 1):
        return 0.0
    return slope / per_value


def _median_slope(values: Sequence[float]) -> float:
    """The median of the slopes of all pairs of points (Theil-Sen)."""
    stride = -(-len(values) // _MAX_POINTS)
    points = list(enumerate(values))[::-1][::stride]
    return statistics.median((a[1] - b[1]) / (a[0] - b[0]) for a, b in itertools.combinations(points, 2))
