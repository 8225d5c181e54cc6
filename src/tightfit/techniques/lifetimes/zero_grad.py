"""Frees gradients that a script only fills with zeros: from then to the next backward pass they need no memory.

`zero_grad(set_to_none=False)`, and torch before 2.0 by default, keep every gradient through the next forward pass, and the next backward
pass allocates new ones to add to them. A lazy gradient of zeros takes its place: it takes memory only once it is read, added to or stepped with.
A gradient that something else refers to is filled in place.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, final

import numpy as np

from tightfit.analysis.intervals import changes, memory_timeline, runs_of
from tightfit.analysis.optimizer import OptimizerProfile, events_of, sides_of_update
from tightfit.analysis.profile import Profile
from tightfit.planner.option import Option
from tightfit.planner.sides import Sides
from tightfit.tape import Category, Column, Phase, SpanKind, Tape
from tightfit.techniques.technique import AbstractTechnique, ChosenOption

if TYPE_CHECKING:
    from tightfit.techniques.session import Session

_ZEROING = ("aten.zero_", "aten._foreach_zero_")


@final
class ZeroGrad(AbstractTechnique):
    """Costs nothing: `zero_grad` frees gradients, whatever its arguments."""

    name = "zero_grad"
    exact = True
    exactness = "bit for bit"
    tolerance = 0.15

    def options(self, profile: Profile) -> Iterable[Option]:
        """One option if gradients are filled with zeros and kept."""
        run = profile.optimizer
        kept = _kept(run)
        zeroing = _zeroing(profile.tape)
        if not len(kept) or not len(zeroing):
            return []
        num_zeroed = len(zeroing) / run.num_steps
        zeroed_bytes = int(run.block_bytes[kept].sum())
        # Zeros are written, and read, added to and written again together with each new gradient.
        saved = sides_of_update(run, zeroed_bytes, round(num_zeroed)) + sides_of_update(
            run, 3 * zeroed_bytes, len(kept)
        )
        sides = Sides() - saved
        step_ranges = [s for begin, end in _gaps(run, zeroing) for s in _until_made_again(run, kept, begin, end)]
        return [
            Option(
                technique=self.name,
                where="gradients",
                changes=changes(step_ranges, -1.0),
                seconds=run.step.added(sides),
                sides=sides,
                exact=self.exact,
                slots=frozenset({"zero_grad"}),
            )
        ]

    def apply(self, session: "Session", chosen: Sequence[ChosenOption]) -> None:
        """Replaces `zero_grad` of the model and of every optimizer."""
        from tightfit.techniques.lifetimes.apply_zero_grad import apply_zero_grad

        apply_zero_grad(session, chosen)


def _kept(run: OptimizerProfile) -> Column:
    """The gradients that stay allocated from one step to the next."""
    spans = run.tape.spans
    ends = spans.end[spans.kind == SpanKind.STEP]
    gradients = run.tape.storages.category == Category.GRADIENTS
    if not len(ends):
        return np.zeros(0, dtype=np.int64)
    return np.flatnonzero(gradients & (run.allocated_at < ends[0]) & (run.freed_at > ends[0]))


def _zeroing(tape: Tape) -> Column:
    """The operators that fill gradients with zeros: outside of all passes."""
    names = [i for i, text in enumerate(tape.strings) if text.startswith(_ZEROING)]
    return np.flatnonzero(np.isin(tape.operators.name, names) & (tape.operators.phase == Phase.OTHER))


def _gaps(run: OptimizerProfile, zeroing: Column) -> list[tuple[int, int]]:
    """From each round of zeroing to the backward pass that comes next, as (operator, operator); the end of the tape where none comes."""
    passes = runs_of(run.tape.operators.phase == Phase.BACKWARD)
    found, previous_end = [], 0
    for begin, end in [*passes, (len(run.tape.operators),) * 2]:
        since = zeroing[(zeroing >= previous_end) & (zeroing < begin)]
        if len(since):
            found.append((int(since[0]), begin))
        previous_end = end
    return found


def _until_made_again(run: OptimizerProfile, kept: Column, begin: int, back: int) -> list[tuple[int, int, int]]:
    """Ranges of events from the zeroing to where each gradient is made again: as far into the backward pass as in the first one."""
    passes = runs_of(run.tape.operators.phase == Phase.BACKWARD)
    starts = dict(passes)
    first, first_end = passes[0]
    ((begin_event, back_event),) = events_of(run, [(begin, back)])
    if back not in starts:
        return memory_timeline(np.full(len(kept), begin_event), np.full(len(kept), back_event), run.block_bytes[kept])
    ((first_event, first_end_event), (_, end_event)) = events_of(run, [(first, first_end), (back, starts[back])])
    share = (run.allocated_at[kept] - first_event) / max(1, first_end_event - first_event)
    again = back_event + np.clip(share, 0.0, 1.0) * (end_event - back_event)
    return memory_timeline(np.full(len(kept), begin_event), again.astype(np.int64), run.block_bytes[kept])
