"""Simple exponential smoothing (Brown 1959), with a memory as long as the horizon."""

from typing import ClassVar, final

import numpy as np

from tightfit.forecast.models.abstract_model import AbstractModel
from tightfit.forecast.models.residual_bounds import residual_bounds
from tightfit.forecast.past import Past
from tightfit.forecast.series import Floats


@final
class ExponentialSmoothing(AbstractModel):
    """The guess is a mean in which a sample weighs less the older it is; its mean age is half the horizon, as that of a plain mean over it."""

    name: ClassVar[str] = "exponential_smoothing"

    def bounds(self, history: Past, levels: Floats) -> Floats:
        """See `AbstractModel`."""
        return residual_bounds(history, smoothed(history.values, 2.0 / (history.horizon + 1)), levels)


def smoothed(values: Floats, weight: float) -> Floats:
    """The running mean (n,) in which each value has `weight` and all before it the rest."""
    means = np.empty(len(values))
    mean = float(values[0])
    for at, value in enumerate(values.tolist()):
        mean += weight * (value - mean)
        means[at] = mean
    return means
