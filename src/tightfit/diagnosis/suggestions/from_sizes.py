"""A suggestion about sizes that are no multiples of eight, as a vocabulary of 50,257: products with them in half precision run on kernels that load number by number.

The seconds are those of the step whose products have the next multiples, so what waits for something else is not promised.
"""

from collections.abc import Iterator

import numpy as np

from tightfit.analysis.profile import Profile
from tightfit.cost.roofline import operator_seconds
from tightfit.cost.shaped import with_aligned_products
from tightfit.cost.steps import step_operators
from tightfit.planner.suggestion import Suggestion
from tightfit.simulate.step_work import priced
from tightfit.simulate.timeline import seconds_of_step
from tightfit.tape import Column, Tape
from tightfit.units import format_seconds

_LEAST_SHARE = 0.02
"""What takes less of a step is not worth a sentence."""


def suggestions_on_sizes(profile: Profile) -> Iterator[Suggestion]:
    """One, of the module that loses most, if all of them lose enough."""
    tape, device = profile.tape, profile.device
    steps = step_operators(tape)
    aligned = with_aligned_products(tape)
    if not steps or not _padded(tape, aligned, tape.geometry.operator):
        return
    now = seconds_of_step(priced(tape, device))
    saved = now - seconds_of_step(priced(aligned, device))
    if saved < _LEAST_SHARE * now:
        return
    begin, end = steps[-1]
    by_operator = operator_seconds(tape, device)[begin:end] - operator_seconds(aligned, device)[begin:end]
    modules = tape.operators.module[begin:end]
    lost = np.bincount(modules, weights=by_operator, minlength=len(tape.strings))
    module = int(np.argmax(lost))
    sizes = _padded(tape, aligned, begin + np.flatnonzero((modules == module) & (by_operator > 0)))
    others = " and others" if (lost > _LEAST_SHARE * lost[module]).sum() > 1 else ""
    of_classes = {head.path for head in profile.loss_heads}
    pairs = ", ".join(f"{after:,} in place of {before:,}" for before, after in sizes)
    yield Suggestion(
        what=f"sizes that are multiples of eight: {pairs}",
        where=f"{tape.strings[module]}{others}",
        changes="model",
        saves_bytes=0,
        adds_seconds=-saved,
        effect=f"would take about {format_seconds(saved)} off a step of {format_seconds(now)}",
        note="a padded vocabulary is one whose last tokens are never used"
        if tape.strings[module] in of_classes
        else "",
    )


def _padded(tape: Tape, aligned: Tape, operators: Column) -> list[tuple[int, int]]:
    """The sizes of products of `operators` that another tape has larger, each with what it is there."""
    rows = np.isin(tape.geometry.operator, operators)
    found = set()
    for name in ("num_rows", "num_columns", "depth"):
        before, after = getattr(tape.geometry, name)[rows], getattr(aligned.geometry, name)[rows]
        found |= {pair for pair in zip(before.tolist(), after.tolist(), strict=True) if pair[0] != pair[1]}
    return sorted(found)
