"""The forecast of one series: all models, the tournament between them, and the corrected level of the one that leads."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from tightfit.forecast.conformal import corrected, levels_around
from tightfit.forecast.models.abstract_model import AbstractModel
from tightfit.forecast.models.decaying_histogram import DecayingHistogram
from tightfit.forecast.models.exponential_smoothing import ExponentialSmoothing
from tightfit.forecast.models.last_value import LastValue
from tightfit.forecast.models.level_conditioned import LevelConditioned
from tightfit.forecast.models.rolling_maximum import RollingMaximum
from tightfit.forecast.models.seasonal import Seasonal, is_installed
from tightfit.forecast.past import Past
from tightfit.forecast.season import find_period
from tightfit.forecast.series import Floats, Series
from tightfit.forecast.tournament import leader, pinball_loss

MODELS: tuple[AbstractModel, ...] = (
    LevelConditioned(),
    RollingMaximum(),
    DecayingHistogram(),
    ExponentialSmoothing(),
    LastValue(),
)
"""The first one leads until another one is better; a series with a season has one model more."""
_MAX_SAMPLES = 8192
"""Of a longer series the end is read: five days of minutes, so that a forecast takes milliseconds."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SeriesForecast:
    """The maximum of the next `horizon` samples of a series: it stays within `median_bytes` with a probability of one half, within `upper_bytes` with the one asked for.

    `season_samples` is the period of a series that repeats itself, else None.
    """

    name: str
    model: str
    horizon: int
    num_samples: int
    season_samples: int | None
    now_bytes: int
    median_bytes: int
    upper_bytes: int
    note: str


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Contest:
    """All models on one series. `bounds` are (origins, levels) each: of the median first, then of `levels_around(quantile)`, of the quantile itself last."""

    history: Past
    quantile: float
    period: int | None
    models: tuple[AbstractModel, ...]
    bounds: tuple[Floats, ...]

    @property
    def lead(self) -> int:
        """The index of the model that leads."""
        outcomes = self.history.past_outcomes
        losses = [pinball_loss(each[:-1, -1], outcomes, self.quantile) for each in self.bounds]
        return leader(losses, self.history.windows_per_origin)

    def upper(self, model: int) -> float:
        """A model's bound after the last sample, at the corrected level, in bytes."""
        # Before 1 / (1 - quantile) windows nobody has seen such a quantile, and misses say that the history was short and not that the model is wrong.
        learnt = math.ceil(self.history.horizon / (1.0 - self.quantile) - 1e-6)
        first = int(np.searchsorted(self.history.origins[:-1], learnt))
        bounds = self.bounds[model][first:, 1:-1]
        return corrected(bounds, self.history.past_outcomes[first:], self.quantile, self.history.windows_per_origin)


def contest(series: Series, *, horizon: int, quantile: float, models: Sequence[AbstractModel] = MODELS) -> Contest:
    """Asks all models, and the seasonal one where the series has a season and statsmodels is installed."""
    history = Past(series=series.last(_MAX_SAMPLES), horizon=horizon)
    period = find_period(history.values, longer_than=horizon)
    if period is not None and is_installed():
        models = (*models, Seasonal(period))
    levels = np.concatenate([[0.5], levels_around(quantile), [quantile]])
    bounds = tuple(model.bounds(history, levels) for model in models)
    return Contest(history=history, quantile=quantile, period=period, models=tuple(models), bounds=bounds)


def forecast_series(series: Series, *, horizon: int, quantile: float) -> SeriesForecast:
    """Forecasts the maximum of the next `horizon` samples; `quantile` is at least 0.5 and below 1."""
    found = contest(series, horizon=horizon, quantile=quantile)
    lead = found.lead
    upper = found.upper(lead)
    return SeriesForecast(
        name=series.name,
        model=found.models[lead].name,
        horizon=horizon,
        num_samples=len(series.values),
        season_samples=found.period,
        # Whole bytes, upwards: a bound rounded down would be exceeded by the very value that it stands for.
        now_bytes=math.ceil(series.values[-1]),
        median_bytes=math.ceil(min(found.bounds[lead][-1, 0], upper)),
        upper_bytes=math.ceil(upper),
        note=_note(found),
    )


def _note(found: Contest) -> str:
    count = len(found.history.values)
    if count * (1.0 - found.quantile) < found.history.horizon:
        return f"{count} {'sample is' if count == 1 else 'samples are'} few for such a bound"
    if found.period is not None and not is_installed():
        return f"repeats itself every {found.period} samples; pip install 'tightfit[season]' to forecast with it"
    return ""
