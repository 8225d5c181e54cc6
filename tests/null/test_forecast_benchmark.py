"""The benchmark of forecasts: no pod is both tuned on and scored, and each row is over the same forecasts."""

import numpy as np
from benchmarks.forecast import lines, split

from tightfit.forecast.series import Series

GIB = float(1 << 30)


def pod(seed: int) -> Series:
    random = np.random.default_rng(seed)
    levels = random.uniform(10, 30, 300)[np.cumsum(random.random(300) < 0.1)] * GIB
    return Series(name=f"pod {seed}", times=57.0 * np.arange(300), values=levels)


def test_pods_are_split_by_name() -> None:
    pods = [pod(seed) for seed in range(7)]
    halves = split(reversed(pods))
    names = {half: {each.name for each in given} for half, given in halves.items()}
    assert not names["tuned on"] & names["scored"]
    assert sorted(len(each) for each in names.values()) == [3, 4]


def test_every_model_is_scored_on_the_same_forecasts() -> None:
    table = lines("scored", [pod(0), pod(1)], 10, 0.9, 40)
    assert [one.model for one in table][:3] == ["tournament, corrected", "tournament", "level_conditioned"]
    assert {(one.num_pods, one.num_forecasts) for one in table} == {(2, 10)}
    assert all(0 <= one.misses_percent <= 100 and one.over_gib < 30 for one in table)
