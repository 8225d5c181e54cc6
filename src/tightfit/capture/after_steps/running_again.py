"""What the first turn of a training loop alone ran, such as the evaluation at step 0 of `if step % 500 == 0`: in a later turn it stands beside the
optimizer's state, which did not exist yet."""

import dataclasses

import numpy as np

from tightfit import units
from tightfit.tape import Column, EventKind, NotReached, SpanKind, Tape
from tightfit.tape.allocated_bytes import allocated_bytes

# What a size rounded by the allocator, or a batch a little shorter, may differ by.
_TOLERANCE = 1.01


def larger_when_run_again(early: tuple[NotReached, ...], tape: Tape) -> tuple[NotReached, ...]:
    """The calls of `early`, which ran in the first turn alone, if they would hold more in a later turn than all that was traced did."""
    if not early:
        return ()
    num_bytes = _bytes_when_run_again(tape)
    if num_bytes <= _TOLERANCE * int(allocated_bytes(tape).max()):
        return ()
    later = f"again, then with about {units.format_bytes(num_bytes)} allocated,"
    return tuple(dataclasses.replace(each, what=f"{each.what} {later}") for each in early)


def _bytes_when_run_again(tape: Tape) -> int:
    """What the last step leaves, and the largest that the first turn has held and freed again."""
    spans = tape.spans
    steps = np.flatnonzero(spans.kind == SpanKind.STEP)
    asides = np.flatnonzero(spans.kind != SpanKind.SETUP)
    if not steps.size:
        return 0
    begin, end = int(spans.begin[asides[0]]), int(spans.end[steps[0]])
    # The input of the call that `begin` is, too, which was made before.
    is_passing = _freed_at(tape) < end
    level = allocated_bytes(tape)
    return int(level[spans.end[steps[-1]]]) + int(allocated_bytes(tape, is_passing)[begin:end].max(initial=0))


def _freed_at(tape: Tape) -> Column:
    """The event that frees each storage; after all events where there is none."""
    found = np.full(len(tape.storages), len(tape.events), dtype=np.int64)
    at = np.flatnonzero(tape.events.kind == EventKind.FREE)
    found[tape.events.storage[at]] = at
    return found
