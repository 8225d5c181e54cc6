"""Corrects a model's level by how often its bounds were exceeded: adaptive, and slow to believe a few windows.

A model's bound of level q may in truth hold in more or fewer than q of the windows. The level that would have held in q of the past windows is used instead
(distributional conformal prediction, Chernozhukov, Wüthrich and Zhu 2021), of late more than long ago, as a series changes its ways (adaptive conformal inference,
Gibbs and Candès 2021). A burst makes many overlapping windows miss at once, so windows count as far as they do not overlap, against a prior in which the model is right.
"""

import numpy as np

from tightfit.forecast.series import Floats

_PRIOR_WINDOWS = 400.0
"""So many windows in which the model is as good as it says: of 400 windows 10 are due to miss a bound of 97.5 %, and between 4 and 16 are chance."""
_HALF_LIFE_WINDOWS = 50.0
"""Windows after which a miss counts half."""
_FACTORS = 2.0 ** np.arange(2.0, -2.5, -0.5)
"""The miss rates that a model is asked for, in units of the one that is wanted: a factor of four each way, beyond which no history is believed."""


def levels_around(quantile: float) -> Floats:
    """The levels, ascending, that `corrected` chooses from: from four times the misses of `quantile`, though no more than in half of the windows, to a quarter."""
    return 1.0 - np.minimum((1.0 - quantile) * _FACTORS, 0.5)


def corrected(bounds: Floats, outcomes: Floats, quantile: float, windows_per_origin: float) -> float:
    """The corrected bound of the last row. `bounds` (origins, levels) are those of `levels_around(quantile)`, `outcomes` those of all rows but the last.

    `windows_per_origin` is how many windows without overlap an outcome is worth.
    """
    nominal = 1.0 - levels_around(quantile)
    age = np.arange(len(outcomes))[::-1] * windows_per_origin
    weights = windows_per_origin * np.exp2(-age / _HALF_LIFE_WINDOWS)
    missed = weights @ (outcomes[:, None] > bounds[:-1])
    misses = (missed + _PRIOR_WINDOWS * nominal) / (weights.sum() + _PRIOR_WINDOWS)
    # Misses fall from the lowest level to the highest; between two levels the bound is interpolated.
    return float(np.interp(quantile - 1.0, -misses, bounds[-1]))
