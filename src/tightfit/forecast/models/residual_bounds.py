"""Bounds from a guess and its past errors: what point forecasts (last value, rolling maximum, smoothing, season) have in common.

The bound of level q is the guess plus the q-quantile of the errors of all windows that had ended by then (split conformal prediction over time,
Vovk et al. 2005: rank ceil((k + 1) q) of k errors).
"""

import bisect

import numpy as np

from tightfit.forecast.past import Past
from tightfit.forecast.series import Floats


def residual_bounds(history: Past, guesses: Floats, levels: Floats) -> Floats:
    """`guesses` (n,) has one guess of the outcome for each sample. Bounds (origins, levels); a guess without any past error is its own bound."""
    errors = history.outcomes - guesses[: len(history.outcomes)]
    ended: list[float] = []
    bounds = np.empty((len(history.origins), len(levels)))
    for row, origin in enumerate(history.origins):
        for start in range(len(ended), max(origin - history.horizon + 1, 0)):
            bisect.insort(ended, float(errors[start]))
        if ended:
            ranks = np.minimum(np.ceil((len(ended) + 1) * levels), len(ended)).astype(int) - 1
            bounds[row] = [ended[rank] for rank in ranks]
        else:
            bounds[row] = 0.0
    return np.maximum(bounds + guesses[history.origins][:, None], 0.0)
