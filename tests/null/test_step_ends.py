"""A step of the program ends with the optimizer that steps least often, among those that still step."""

import pytest

from tightfit.tape.step_ends import MAX_STEPS_OF_ONE_OPTIMIZER, ends_step

MOST = MAX_STEPS_OF_ONE_OPTIMIZER


@pytest.mark.parametrize(
    ("counts", "own", "num_ended", "is_end"),
    [
        ((1,), 1, 0, True),
        # The critic of a GAN steps several times for each step of the generator.
        ((3, 1), 3, 0, False),
        ((3, 1), 1, 0, True),
        ((4, 1), 4, 1, False),
        # One that has not stepped yet is waited for, up to a point.
        ((1, 0), 1, 0, False),
        ((MOST, 0), MOST, 0, True),
        # The optimizer of a first stage has stopped.
        ((MOST + 2, 2), MOST + 2, MOST + 1, True),
        ((MOST + 1, 2), MOST + 1, 2, False),
    ],
)
def test_which_step_of_an_optimizer_ends_one(counts: tuple[int, ...], own: int, num_ended: int, is_end: bool) -> None:
    assert ends_step(counts, own, num_ended) is is_end
