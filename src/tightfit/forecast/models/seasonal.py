"""A season taken from the series by STL (Cleveland et al. 1990; statsmodels): for series that repeat themselves, and no others.

statsmodels is an optional dependency, imported where a series has a season.
"""

import importlib.util
from typing import ClassVar, final

import numpy as np

from tightfit.forecast.models.abstract_model import AbstractModel
from tightfit.forecast.models.exponential_smoothing import smoothed
from tightfit.forecast.models.residual_bounds import residual_bounds
from tightfit.forecast.past import Past
from tightfit.forecast.series import Floats

_MIN_PERIODS = 2
"""STL needs two periods."""
_MIN_STRIDE = 256
"""The season is worked out anew after so many samples at the earliest, since each time takes tens of milliseconds."""


def is_installed() -> bool:
    """Whether statsmodels is there; it is not imported for that."""
    return importlib.util.find_spec("statsmodels") is not None


@final
class Seasonal(AbstractModel):
    """The guess is the level of late plus the highest part of the season within the horizon. `period` is in samples."""

    name: ClassVar[str] = "seasonal"

    def __init__(self, period: int) -> None:
        self.period = period

    def bounds(self, history: Past, levels: Floats) -> Floats:
        """See `AbstractModel`; the period itself is that of the whole series."""
        return residual_bounds(history, self._guesses(history.values, history.horizon), levels)

    def _guesses(self, values: Floats, horizon: int) -> Floats:
        guesses = values.copy()
        # At whole periods, which do not depend on how many samples there are.
        stride = self.period * -(-_MIN_STRIDE // self.period)
        for begin in range(max(stride, _MIN_PERIODS * self.period), len(values), stride):
            end = min(begin + stride, len(values))
            season = self._season(values[:begin])
            phases = np.arange(end) % self.period
            level = smoothed(values[:end] - season[phases], 2.0 / (horizon + 1))[begin:]
            ahead = np.lib.stride_tricks.sliding_window_view(np.tile(season, 2 + horizon // self.period), horizon)
            guesses[begin:end] = level + ahead.max(axis=1)[(phases[begin:] + 1) % self.period]
        return guesses

    def _season(self, values: Floats) -> Floats:
        """The last period of the seasonal part, (period,), in the order of the samples' indices modulo the period."""
        from statsmodels.tsa.seasonal import STL  # pyrefly: ignore[missing-import]

        jump = max(1, self.period // 10)
        parts = STL(values, period=self.period, seasonal_jump=jump, trend_jump=jump, low_pass_jump=jump).fit()
        # As the fit ends at a whole period, its last period begins at phase zero.
        return np.asarray(parts.seasonal, dtype=np.float64)[-self.period :]
