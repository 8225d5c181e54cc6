"""A series: bytes over time, as they were sampled."""

import dataclasses

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

GAP = 5.0
"""Samples further apart than this many intervals have a gap between them: what happened there was not seen."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Series:
    """The samples of one pod, process or card: at `times` (n,), in seconds and ascending, `values` (n,), in bytes; n is at least 1."""

    name: str
    times: Floats
    values: Floats

    @property
    def interval(self) -> float:
        """The usual time between two samples, in seconds (their median distance); 0 for a single sample."""
        return float(np.median(np.diff(self.times))) if len(self.times) > 1 else 0.0

    def last(self, count: int) -> "Series":
        """The last `count` samples."""
        return Series(name=self.name, times=self.times[-count:], values=self.values[-count:])

    def has_gap_within(self, horizon: int) -> NDArray[np.bool_]:
        """Whether a gap lies in the `horizon` samples after each sample, (n - horizon,): their maximum may not have been seen."""
        gaps = np.concatenate([[0], np.cumsum(np.diff(self.times) > GAP * self.interval)])
        return gaps[horizon:] > gaps[:-horizon]


def future_maximum(values: Floats, horizon: int) -> Floats:
    """The maximum of the `horizon` values after each one, for those that have as many: (n - horizon,), empty if n <= horizon."""
    if len(values) <= horizon:
        return np.empty(0)
    return np.lib.stride_tricks.sliding_window_view(values, horizon)[1:].max(axis=1)


def recent_maximum(values: Floats, window: int) -> Floats:
    """The maximum of each value and the `window - 1` before it, (n,); fewer at the start."""
    window = min(window, len(values))
    padded = np.concatenate([np.full(window - 1, values[0]), values])
    return np.lib.stride_tricks.sliding_window_view(padded, window).max(axis=1)
