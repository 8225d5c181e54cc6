"""A running tournament: which model's past bounds were the best, by the pinball loss.

The pinball loss charges a bound of level q with q for each byte that it was exceeded by and 1 - q for each byte that it was too high. The true quantile minimises it,
so that a model wins neither by reserving everything nor by missing often.
"""

from collections.abc import Sequence

import numpy as np

from tightfit.forecast.series import Floats

_HALF_LIFE_WINDOWS = 60.0
"""Windows after which a loss counts half: a model that was good this morning need not be now."""
_MIN_WINDOWS = 8.0
"""Fewer windows than these decide nothing."""
_STANDARD_ERRORS = 2.0
"""Another model leads when its mean loss is lower by so many standard errors of the difference. Losses are rare and large: less is luck."""


def pinball_loss(bounds: Floats, outcomes: Floats, quantile: float) -> Floats:
    """The loss of each bound, in bytes."""
    missing = outcomes - bounds
    return np.maximum(quantile * missing, (quantile - 1.0) * missing)


def leader(losses: Sequence[Floats], windows_per_origin: float) -> int:
    """The index of the model that leads after the last origin. `losses` has an array (origins,) for each; the first model leads unless another is clearly better."""
    table = np.stack(losses)
    num_origins = table.shape[1]
    if num_origins * windows_per_origin < _MIN_WINDOWS:
        return 0
    weights = np.exp2(-np.arange(num_origins)[::-1] * windows_per_origin / _HALF_LIFE_WINDOWS)
    weights /= weights.sum()
    difference = table - table[0]
    mean = difference @ weights
    # Losses of windows that overlap are one loss: the variance is that of as many as do not.
    num_windows = windows_per_origin / (weights**2).sum()
    error = np.sqrt(((difference - mean[:, None]) ** 2) @ weights / num_windows)
    is_better = mean < -_STANDARD_ERRORS * error
    return int(np.argmin(np.where(is_better, mean, 0.0)))
