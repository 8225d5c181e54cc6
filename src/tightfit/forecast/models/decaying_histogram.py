"""A decaying histogram of peaks, as the Vertical Pod Autoscaler of Kubernetes has for memory.

Its constants are those of kubernetes/autoscaler (vertical-pod-autoscaler/pkg/recommender/model/aggregations_config.go): buckets from 10 MB to 1 TB, each 5 % wider
than the one before, and half the weight for a peak that is a day older. There a peak is the maximum of a day, here that of a window as long as the horizon.
"""

from typing import ClassVar, final

import numpy as np

from tightfit.forecast.models.abstract_model import AbstractModel
from tightfit.forecast.past import Past
from tightfit.forecast.series import Floats

_FIRST_BYTES, _LAST_BYTES, _GROWTH = 1e7, 1e12, 1.05
_HALF_LIFE_SECONDS = 86_400.0


@final
class DecayingHistogram(AbstractModel):
    """The bound is the end of the bucket that the weighted quantile of all past peaks falls in, and no lower than the first bucket's."""

    name: ClassVar[str] = "decaying_histogram"

    def bounds(self, history: Past, levels: Floats) -> Floats:
        """See `AbstractModel`."""
        ends = _bucket_ends()
        buckets = np.minimum(np.searchsorted(ends, history.outcomes), len(ends) - 1)
        age = history.series.times[-1] - history.series.times[: len(buckets)]
        # A window that starts at s has ended for all origins from s + horizon on.
        rows = np.searchsorted(history.origins - history.horizon, np.arange(len(buckets)))
        sums = np.zeros((len(history.origins), len(ends)))
        np.add.at(sums, (rows, buckets), np.exp2(-age / _HALF_LIFE_SECONDS))
        sums = np.cumsum(np.cumsum(sums, axis=0), axis=1)
        bounds = np.empty((len(history.origins), len(levels)))
        for row, origin in enumerate(history.origins):
            total = sums[row, -1]
            # Before the first window has ended there is only the present value.
            bounds[row] = (
                ends[np.minimum(np.searchsorted(sums[row], levels * total), len(ends) - 1)]
                if total > 0
                else history.values[origin]
            )
        return bounds


def _bucket_ends() -> Floats:
    count = int(np.ceil(np.log(_LAST_BYTES * (_GROWTH - 1) / _FIRST_BYTES + 1) / np.log(_GROWTH)))
    ends: Floats = np.power(_GROWTH, np.arange(1.0, count + 1.0))
    return _FIRST_BYTES * (ends - 1) / (_GROWTH - 1)
