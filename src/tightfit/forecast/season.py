"""Whether a series repeats itself: a period that is significant, or none.

The autocorrelation of a series without a season wanders around zero, the more the slower the series is; Bartlett's formula (1946) says how much. A period is believed
where the autocorrelation has a peak far above that, which comes back at twice the lag, over three periods at least.
"""

import numpy as np

from tightfit.forecast.series import Floats

_MIN_PERIODS = 3
_STANDARD_ERRORS = 3.0
"""Hundreds of lags are looked at, and the highest of so many is often two standard errors high."""
_MIN_CORRELATION = 0.3
"""Below this a season explains less of the series than it costs to know it."""
_MIN_DEPTH = 0.3
"""By so much the autocorrelation falls between lag zero and the peak: without, it is one slow decay."""


def find_period(values: Floats, *, longer_than: int) -> int | None:
    """The period in samples, or None. One that is no longer than the horizon is of no use: every window has all of it."""
    scores = _peaks(values, longer_than=longer_than)
    significant = {lag: height for lag, (height, is_significant) in scores.items() if is_significant}
    return max(significant, key=lambda lag: significant[lag]) if significant else None


def likeliest_period(values: Floats, *, longer_than: int) -> int | None:
    """The lag of the highest peak, significant or not; None where the autocorrelation has no peak."""
    scores = _peaks(values, longer_than=longer_than)
    return max(scores, key=lambda lag: scores[lag][0]) if scores else None


def _peaks(values: Floats, *, longer_than: int) -> dict[int, tuple[float, bool]]:
    """The peaks of the autocorrelation by lag: their height, and whether they are significant."""
    count = len(values)
    last = count // _MIN_PERIODS
    first = max(longer_than + 1, 3)
    if last <= first or not np.ptp(values):
        return {}
    correlation = _autocorrelation(values)
    # Bartlett: the variance at a lag is that of all that comes before it.
    error = np.sqrt((1 + 2 * np.cumsum(np.concatenate([[0.0], correlation[1:] ** 2]))) / count)
    lowest = np.minimum.accumulate(correlation)
    inner = np.arange(first, last)
    is_peak = (correlation[inner] > correlation[inner - 1]) & (correlation[inner] >= correlation[inner + 1])
    peaks = {}
    for lag in inner[is_peak].tolist():
        height = float(correlation[lag])
        echo = float(correlation[2 * lag - lag // 8 : 2 * lag + lag // 8 + 1].max())
        is_significant = (
            height > max(_MIN_CORRELATION, _STANDARD_ERRORS * error[lag - 1])
            and height - lowest[lag] > _MIN_DEPTH
            and echo > _MIN_CORRELATION * height
        )
        peaks[lag] = height, is_significant
    return peaks


def _autocorrelation(values: Floats) -> Floats:
    """Of the values less their straight line, for lags 0 up to n - 1."""
    count = len(values)
    at = np.arange(count, dtype=np.float64)
    slope, level = np.polyfit(at, values, 1)
    rest = values - (slope * at + level)
    spectrum = np.fft.rfft(rest, 2 * count)
    covariance = np.fft.irfft(spectrum * np.conj(spectrum))[:count]
    return covariance / covariance[0] if covariance[0] > 0 else np.zeros(count)
