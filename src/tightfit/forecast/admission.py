"""Whether one more job fits beside the series that share a card: now, and for as long as the horizon."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from tightfit.forecast.forecasts import forecast_series
from tightfit.forecast.horizon import Horizon
from tightfit.forecast.series import GAP, Floats, Series

_LADDER = (0.5, 0.75, 0.9, 0.95, 0.975, 0.99, 0.995)
"""The probabilities that are tried. Days of minutes have seen no more of their tail."""
_MAX_CELLS = 8192


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """What all series need together, now and at most over the horizon, beside a job.

    `upper_bytes` is the bound of the sum of all series (not the sum of their bounds: they do not all peak at once) at the quantile that was asked for.
    `probability` is the highest one of a few for which the job fits over the whole horizon; None if it is below one half.
    """

    job_bytes: int
    capacity_bytes: int
    now_bytes: int
    upper_bytes: int
    probability: float | None

    @property
    def fits_now(self) -> bool:
        """Whether the job fits at this moment."""
        return self.now_bytes + self.job_bytes <= self.capacity_bytes

    @property
    def fits(self) -> bool:
        """Whether it fits now and stays within the bound over the horizon."""
        return self.fits_now and self.upper_bytes + self.job_bytes <= self.capacity_bytes


def total(series: Sequence[Series]) -> Series:
    """The sum of all series over time, on a grid as wide as their usual interval; each counts with the largest sample of a cell.

    Between two samples a series is where it was. One that has had no sample for five intervals has ended, and gives its memory back.
    """
    intervals = [each.interval for each in series if each.interval]
    interval = float(np.median(intervals)) if intervals else 1.0
    end = max(float(each.times[-1]) for each in series)
    begin = max(min(float(each.times[0]) for each in series), end - interval * (_MAX_CELLS - 1))
    count = math.floor((end - begin) / interval + 0.5) + 1
    sums = np.zeros(count)
    for each in series:
        sums += _on_grid(each, begin, interval, count)
    return Series(name="total", times=begin + interval * np.arange(count, dtype=np.float64), values=sums)


def admit(
    series: Sequence[Series], *, job_bytes: int, capacity_bytes: int, horizon: Horizon, quantile: float
) -> Admission:
    """Whether a job of `job_bytes` fits a card of `capacity_bytes` beside all `series`."""
    together = total(series)
    samples = horizon.num_samples(together)
    found = forecast_series(together, horizon=samples, quantile=quantile)
    free = capacity_bytes - job_bytes
    uppers = {each: forecast_series(together, horizon=samples, quantile=each).upper_bytes for each in _LADDER}
    fitting = [each for each, upper in uppers.items() if max(upper, found.now_bytes) <= free]
    return Admission(
        job_bytes=job_bytes,
        capacity_bytes=capacity_bytes,
        now_bytes=found.now_bytes,
        upper_bytes=found.upper_bytes,
        probability=max(fitting, default=None),
    )


def _on_grid(series: Series, begin: float, interval: float, count: int) -> Floats:
    cells = np.floor((series.times - begin) / interval + 0.5).astype(np.int64)
    inside = cells >= 0
    values = np.full(count, -1.0)
    np.maximum.at(values, cells[inside], series.values[inside])
    at = np.arange(count)
    last = np.maximum.accumulate(np.where(values >= 0, at, -1))
    is_there = (last >= 0) & (at - last <= GAP)
    return np.where(is_there, values[np.maximum(last, 0)], 0.0)
