"""Which series of bytes at the ends of steps count as growth."""

import pytest

from tightfit.runtime.leaks.robust_growth import MIN_STEPS, growth_per_step

RISING = [100 * step for step in range(14)]


@pytest.mark.parametrize(
    ("series", "per_step"),
    [
        (RISING, 100.0),
        ([900, 950, *RISING], 100.0),
        # One batch in five leaves something.
        ([500 * (step // 5) for step in range(40)], 100.0),
        # Batches of different sizes come on top.
        ([100 * step + 37 * (step % 3) for step in range(24)], 100.0),
    ],
)
def test_what_rises_and_never_comes_back_grows(series: list[int], per_step: float) -> None:
    assert growth_per_step(series) == pytest.approx(per_step, rel=0.15)


@pytest.mark.parametrize(
    "series",
    [
        [7] * 14,
        RISING[: MIN_STEPS - 1],
        # Filled in the first steps; filled to the middle.
        [0, 100, *[200] * 12],
        [min(step, 7) * 100 for step in range(14)],
        # Emptied every fourth step.
        [100 * (step % 4) for step in range(14)],
        # One copy, made late.
        *([0] * jump + [1000] * (14 - jump) for jump in range(3, 12)),
        list(reversed(RISING)),
    ],
)
def test_what_fills_returns_or_jumps_once_does_not(series: list[int]) -> None:
    assert growth_per_step(series) == 0.0


def test_thinned_series_have_the_same_slope() -> None:
    assert growth_per_step(RISING, per_value=4) == 25.0
