"""Whether a series grows all the time, as a leak does, and how fast.

The forecasts of levels know nothing above what a series has reached before, and a leak is always above that: so where growth is steady it is carried on. Steady: in each of a few spans
of the last hour the median is higher than in the span before. The slope is the median of all slopes between two samples (Theil 1950, Sen 1968), which bursts do not move.
"""

import numpy as np

from tightfit.forecast.series import Series
from tightfit.units import MIB

_NUM_SPANS = 6
_MIN_SAMPLES = 24
_MAX_SAMPLES = 60
_MIN_GROWTH_BYTES = 32 * MIB
_MIN_GROWTH_SHARE = 0.01


def steady_growth(past: Series) -> float:
    """Bytes per second, of at most the last sixty samples; 0 where the series does not grow steadily, or by less than 1 % and 32 MiB, or has too few samples."""
    recent = past.last(_MAX_SAMPLES)
    values, times = recent.values, recent.times
    if len(values) < _MIN_SAMPLES:
        return 0.0
    medians = np.array([np.median(span) for span in np.array_split(values, _NUM_SPANS)])
    grown = medians[-1] - medians[0]
    if not (np.diff(medians) > 0).all() or grown < max(_MIN_GROWTH_BYTES, _MIN_GROWTH_SHARE * medians[0]):
        return 0.0
    later, earlier = np.triu_indices(len(values), 1)[::-1]
    return max(0.0, float(np.median((values[later] - values[earlier]) / (times[later] - times[earlier]))))
