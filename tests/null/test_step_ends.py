"""A step of the program ends with the optimizer that steps least often, among those that still step."""

import pytest

from tightfit.tape.step_ends import MAX_STEPS_OF_ONE_OPTIMIZER, ends_of_run, ends_step

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


def ends_meanwhile(steppers: str) -> list[int]:
    """The positions at which the rule for a run that goes on ends a step; every optimizer is there from the begin."""
    counts, ends = dict.fromkeys(steppers, 0), list[int]()
    for position, who in enumerate(steppers):
        counts[who] += 1
        if ends_step(counts.values(), counts[who], len(ends)):
            ends.append(position)
    return ends


@pytest.mark.parametrize("steppers", ["aaaa", "abab", "aabaab", "aabaaba", "abcabc", "aab"])
def test_a_run_that_is_over_has_the_ends_that_it_had_meanwhile(steppers: str) -> None:
    assert ends_of_run(steppers) == ends_meanwhile(steppers) != []


@pytest.mark.parametrize(("steppers", "ends"), [("aaabbbb", [0, 1, 2, 3, 4, 5, 6]), ("a" * 12 + "b", [12]), ("", [])])
def test_a_run_that_is_over_shows_its_stages_and_its_slow_optimizers(steppers: str, ends: list[int]) -> None:
    assert ends_of_run(steppers) == ends
