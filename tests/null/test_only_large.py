"""The part of the largest batch that fits without recomputation, from a tape whose last step has the largest batch."""

import pytest
from tests.null.test_estimate_peak import tape_of

from tightfit.fit.only_large import share_that_fits
from tightfit.tape import Category, SpanKind

WEIGHTS, GRADIENT, ACTIVATIONS = 1000, 300, 4000


def tape():
    """Weights, a short step, and one of the largest batch: activations, a gradient, both freed."""
    sizes = [WEIGHTS, 500, GRADIENT, ACTIVATIONS, GRADIENT]
    events = [0, 1, 2, -2, -3, 3, 4, -4, -5]
    categories = [
        Category.PARAMETERS,
        Category.ACTIVATIONS,
        Category.GRADIENTS,
        Category.ACTIVATIONS,
        Category.GRADIENTS,
    ]
    spans = [(5, SpanKind.STEP, 1, 5), (6, SpanKind.STEP, 5, 9)]
    return tape_of(sizes, events, categories=categories, spans=spans)


@pytest.mark.parametrize("short", [1000, 2000, 3000])
def test_what_is_missing_is_taken_from_what_grows(short: int) -> None:
    needed = 10_000
    share = share_that_fits(tape(), needed, needed - short)
    assert share == pytest.approx(1 - short / ACTIVATIONS)


def test_nothing_fits_where_what_no_batch_changes_is_too_large() -> None:
    assert share_that_fits(tape(), 10_000, 10_000 - ACTIVATIONS - 1) == 0.0


def test_all_fits_where_nothing_is_missing() -> None:
    assert share_that_fits(tape(), 10_000, 12_000) == 1.0


def test_a_run_without_steps_has_no_largest_one() -> None:
    assert share_that_fits(tape_of([10], [0], spans=[(5, SpanKind.SETUP, 0, 1)]), 10, 5) == 0.0
