"""Forecasts: what each model is given and says, that none looks ahead, and that the bound holds on series whose law is known."""

import dataclasses
import math

import numpy as np
import pytest

from tightfit.forecast import forecasts
from tightfit.forecast.admission import total
from tightfit.forecast.conformal import corrected, levels_around
from tightfit.forecast.forecasts import MODELS, contest, forecast_series
from tightfit.forecast.models.abstract_model import AbstractModel
from tightfit.forecast.models.level_conditioned import LevelConditioned
from tightfit.forecast.models.seasonal import Seasonal
from tightfit.forecast.past import Past
from tightfit.forecast.season import find_period
from tightfit.forecast.series import Floats, Series, future_maximum, recent_maximum
from tightfit.forecast.tournament import leader, pinball_loss

GIB = float(1 << 30)


def series_of(values: Floats, interval: float = 60.0) -> Series:
    return Series(name="pod", times=interval * np.arange(len(values)), values=np.asarray(values, dtype=np.float64))


def history_at(series: Series, *, horizon: int, quantile: float) -> Past:
    return contest(series, horizon=horizon, quantile=quantile, models=()).history


def steps(seed: int, count: int, changes_per_sample: float = 0.2) -> Floats:
    """A pod that stays where it is, and now and then goes to one of its levels."""
    random = np.random.default_rng(seed)
    levels = random.choice(np.linspace(10, 40, 60), size=count) * GIB
    at = np.cumsum(random.random(count) < changes_per_sample)
    return levels[at]


def test_the_maximum_of_the_next_and_of_the_last_samples() -> None:
    values = np.array([3.0, 1.0, 4.0, 1.0, 5.0, 0.0])
    assert future_maximum(values, 2).tolist() == [4.0, 4.0, 5.0, 5.0]
    assert recent_maximum(values, 3).tolist() == [3.0, 3.0, 4.0, 4.0, 5.0, 5.0]
    assert future_maximum(values, 6).tolist() == []


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
@pytest.mark.parametrize("horizon", [1, 7])
def test_no_model_looks_ahead(model: AbstractModel, horizon: int) -> None:
    values = steps(1, 260)
    levels = np.array([0.5, 0.9, 0.975])
    whole = history_at(series_of(values), horizon=horizon, quantile=0.9)
    bounds = model.bounds(whole, levels)
    assert len(whole.origins) > 30
    for row in (0, len(whole.origins) // 2):
        origin = int(whole.origins[row])
        then = history_at(series_of(values[: origin + 1]), horizon=horizon, quantile=0.9)
        assert model.bounds(then, levels)[-1] == pytest.approx(bounds[row])
    assert (np.diff(bounds, axis=1) >= 0).all()


@pytest.mark.parametrize(("horizon", "quantile", "rate"), [(10, 0.975, 0.05), (60, 0.9, 0.05), (1, 0.9, 0.6)])
def test_the_bound_holds_as_often_as_it_says(horizon: int, quantile: float, rate: float) -> None:
    missed, num_windows = [], 0.0
    for seed in range(8):
        pod = series_of(steps(seed, 2000, changes_per_sample=rate))
        found = contest(pod, horizon=horizon, quantile=quantile, models=[LevelConditioned()])
        late = found.history.origins[:-1] > 1000
        missed += (found.history.past_outcomes > found.bounds[0][:-1, -1])[late].tolist()
        num_windows += late.sum() * found.history.windows_per_origin
    # Three standard errors of as many windows as do not overlap. The levels have gaps, so that bounds may hold more often.
    error = 3 * np.sqrt(quantile * (1 - quantile) / num_windows)
    assert num_windows > 50
    assert np.mean(missed) <= 1 - quantile + error
    assert np.mean(missed) >= (1 - quantile - error) / 2


def test_an_idle_pod_needs_less_than_a_busy_one() -> None:
    busy = steps(3, 600, changes_per_sample=0.8)
    idle = np.concatenate([busy, np.full(300, busy[-1])])
    now, later = (forecast_series(series_of(each), horizon=10, quantile=0.975) for each in (busy, idle))
    assert later.upper_bytes < now.upper_bytes
    assert later.median_bytes == math.ceil(busy[-1])


def test_a_pod_below_all_that_it_has_done_may_go_back_up() -> None:
    # No change has ever begun so low: that is no knowledge, and not a level that nothing leaves.
    values = np.concatenate([steps(4, 500, changes_per_sample=0.9), [1.0 * GIB]])
    assert forecast_series(series_of(values), horizon=10, quantile=0.975).upper_bytes > 20 * GIB


def test_a_constant_series_stays() -> None:
    found = forecast_series(series_of(np.full(400, 5 * GIB)), horizon=10, quantile=0.975)
    assert (found.median_bytes, found.upper_bytes, found.model) == (5 * GIB, 5 * GIB, "level_conditioned")


@pytest.mark.parametrize("count", [1, 2, 5, 11, 30])
def test_a_short_series_says_so(count: int) -> None:
    found = forecast_series(series_of(steps(5, count)), horizon=10, quantile=0.975)
    assert found.note == f"{count} {'sample is' if count == 1 else 'samples are'} few for such a bound"
    assert found.now_bytes <= found.upper_bytes
    assert found.median_bytes <= found.upper_bytes


def test_the_bound_is_whole_bytes_and_no_lower_than_what_it_stands_for() -> None:
    found = forecast_series(series_of(np.full(50, 7.25)), horizon=10, quantile=0.975)
    assert (found.now_bytes, found.median_bytes, found.upper_bytes) == (8, 8, 8)


def test_sizes_scale() -> None:
    values = steps(6, 700)
    small, large = (forecast_series(series_of(factor * values), horizon=10, quantile=0.9) for factor in (1, 4))
    assert small.model == large.model == "level_conditioned"
    assert large.upper_bytes == pytest.approx(4 * small.upper_bytes)


def test_the_leader_changes_for_a_clear_difference_alone() -> None:
    random = np.random.default_rng(0)
    noise = random.exponential(size=(2, 200))
    assert leader([noise[0], noise[1]], 0.5) == 0
    assert leader([noise[0], 0.5 * noise[1]], 0.5) == 1
    # The same, in three windows, is luck.
    assert leader([noise[0][:6], 0.5 * noise[1][:6]], 0.5) == 0


def test_another_model_takes_over_where_it_is_better() -> None:
    # A ramp: every value is new, so what was seen bounds nothing, and the last value with its past errors does.
    found = forecast_series(series_of(np.arange(1, 1200) * GIB / 100), horizon=10, quantile=0.9)
    assert found.model != "level_conditioned"
    assert found.upper_bytes >= 12.08 * GIB
    assert found.upper_bytes <= 12.3 * GIB


def test_a_leak_is_seen_before_the_quantile_is() -> None:
    # No value was ever seen before, so a bound made of what was seen is exceeded each time.
    values = 10 * GIB + np.arange(150) * GIB / 50
    found = forecast_series(series_of(values), horizon=10, quantile=0.975)
    assert found.upper_bytes >= values[-1] + 10 * GIB / 50 - 1


@pytest.mark.parametrize("count", [10, 30, 100])
@pytest.mark.parametrize("horizon", [1, 10])
def test_the_median_of_a_series_that_only_rises_is_not_below_its_end(count: int, horizon: int) -> None:
    found = forecast_series(series_of(20 * GIB + np.arange(count) * GIB / 50), horizon=horizon, quantile=0.975)
    assert found.median_bytes >= found.now_bytes


def test_the_pinball_loss_is_least_at_the_quantile() -> None:
    outcomes = np.arange(1.0, 101.0)
    losses = [pinball_loss(np.full(100, bound), outcomes, 0.9).mean() for bound in range(80, 101)]
    assert 80 + int(np.argmin(losses)) in (90, 91)


def test_the_level_is_corrected_by_what_was_missed() -> None:
    quantile, count = 0.9, 400
    levels = levels_around(quantile)
    assert (np.diff(levels) >= 0).all()
    assert quantile in levels
    # Bounds that are the levels themselves, against outcomes that miss them as often as they should, half as often, and always.
    bounds = np.tile(levels, (count + 1, 1))
    outcomes = np.random.default_rng(0).random(count)
    assert corrected(bounds, outcomes, quantile, 1.0) == pytest.approx(quantile, abs=0.005)
    assert corrected(bounds, 0.5 * outcomes, quantile, 1.0) < quantile
    assert quantile < corrected(bounds, outcomes + 1.0, quantile, 1.0) <= levels[-1]
    # A few windows move it little: even if each of them was missed.
    assert corrected(bounds[:4], outcomes[:3] + 1.0, quantile, 0.5) == pytest.approx(quantile, abs=0.01)
    assert corrected(bounds[:1], outcomes[:0], quantile, 1.0) == quantile


def test_windows_over_a_gap_are_not_learnt_from() -> None:
    values = steps(7, 800)
    times = 60.0 * np.arange(800)
    times[500:] += 7200
    whole = series_of(values)
    gap = dataclasses.replace(whole, times=times)
    missing = {*history_at(whole, horizon=10, quantile=0.9).origins} - {
        *history_at(gap, horizon=10, quantile=0.9).origins
    }
    assert missing == {490, 495}


def test_many_levels_are_rounded_up() -> None:
    values = np.random.default_rng(8).uniform(10, 20, 2000) * GIB
    model = LevelConditioned()
    bounds = model.bounds(history_at(series_of(values), horizon=10, quantile=0.9), np.array([0.5, 0.999]))
    assert bounds[-1, 0] < bounds[-1, 1] <= values.max()
    assert bounds[-1, 1] > 19.9 * GIB


def repeating(count: int, period: int) -> Floats:
    """A pod that is busy for the first quarter of each period; its own small steps beside it."""
    return np.where(np.arange(count) % period < period // 4, 30 * GIB, 10 * GIB) + steps(9, count) / 40


def test_a_season_is_found_where_there_is_one_and_nowhere_else() -> None:
    assert find_period(repeating(1000, 96), longer_than=10) == 96
    # Within a window as long as the season, all of it happens.
    assert find_period(repeating(1000, 96), longer_than=96 * 3) is None
    random = np.random.default_rng(10)
    wandering = [np.cumsum(random.normal(size=1000)) for _ in range(10)]
    stepping = [steps(seed, 1000) for seed in range(10)]
    constant = [np.full(1000, GIB), np.arange(1000.0), np.ones(3)]
    assert [find_period(each, longer_than=10) for each in (*wandering, *stepping, *constant)] == [None] * 23


def test_a_season_is_forecast() -> None:
    pytest.importorskip(
        "statsmodels", reason="the season is forecast by STL of statsmodels (pip install 'tightfit[season]')"
    )
    # Ten samples before the next busy quarter, and ten after the start of the quiet rest.
    model = Seasonal(96)
    for end, high in ((960 + 90, True), (960 + 40, False)):
        history = history_at(series_of(repeating(end, 96)), horizon=10, quantile=0.9)
        assert (model.bounds(history, np.array([0.5]))[-1, 0] > 25 * GIB) == high


def test_a_season_without_statsmodels_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecasts, "is_installed", lambda: False)
    found = forecast_series(series_of(repeating(1000, 96)), horizon=10, quantile=0.9)
    assert found.season_samples == 96
    assert found.note.startswith("repeats itself every 96 samples")


def test_the_total_is_the_sum_of_those_that_are_there() -> None:
    minutes = 60.0 * np.arange(30)
    steady = Series(name="a", times=minutes + 7, values=np.full(30, 3.0))
    # It starts later, misses a sample, and ends.
    brief = Series(name="b", times=minutes[[5, 6, 8, 9]], values=np.array([1.0, 2.0, 4.0, 4.0]))
    sums = total([steady, brief]).values
    assert sums[:10].tolist() == [3, 3, 3, 3, 3, 4, 5, 5, 7, 7]
    assert sums[14:16].tolist() == [7, 3]
    assert sums[-1] == 3
    assert total([Series(name="a", times=np.zeros(1), values=np.array([5.0]))]).values.tolist() == [5.0]
