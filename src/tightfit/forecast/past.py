"""What is known of one series at a list of moments: the values up to each, and for past ones the maximum that followed."""

import dataclasses
import functools

import numpy as np
from numpy.typing import NDArray

from tightfit.forecast.series import Floats, Series, future_maximum

Indices = NDArray[np.int64]

_MAX_ORIGINS = 256
_ORIGINS_PER_WINDOW = 2
"""Windows that begin half the horizon apart overlap so much that more of them tell nothing new."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Past:
    """A series and the horizon of its forecast, in samples.

    An origin is the index of a sample up to which (itself included) a forecast knows the values; its outcome is the maximum of the next `horizon`.
    """

    series: Series
    horizon: int

    @property
    def values(self) -> Floats:
        """The samples, (n,), in bytes."""
        return self.series.values

    @functools.cached_property
    def outcomes(self) -> Floats:
        """The maximum of the `horizon` samples after each one, as far as there are as many: (max(n - horizon, 0),)."""
        return future_maximum(self.values, self.horizon)

    @functools.cached_property
    def origins(self) -> Indices:
        """Past origins whose outcome is known, at multiples of a stride so that one more sample moves none, then the last sample: ascending."""
        stride = self._stride
        # Two windows behind it are the least that a model can have learnt from.
        past = np.arange(-(-2 * self.horizon // stride) * stride, len(self.outcomes), stride)
        if len(past):
            past = past[~self.series.has_gap_within(self.horizon)[past]]
        return np.append(past[-_MAX_ORIGINS:], len(self.values) - 1)

    @functools.cached_property
    def past_outcomes(self) -> Floats:
        """The outcomes of all origins but the last, which has none yet."""
        return self.outcomes[self.origins[:-1]] if len(self.origins) > 1 else np.empty(0)

    @property
    def windows_per_origin(self) -> float:
        """How many windows that do not overlap an origin is worth."""
        return self._stride / self.horizon

    @property
    def _stride(self) -> int:
        return max(1, self.horizon // _ORIGINS_PER_WINDOW)
