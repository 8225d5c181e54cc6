"""Copies of batches to the card that the host does not wait for, from a bounded ring of page-locked memory.

Torch's advice for a loader (pin its memory, `non_blocking` copies: https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html), without a change of the program, and right for
programs that write to a batch after they have copied it: its bytes are taken when the copy is asked for. When a batch is fetched is left as it is.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, final

import numpy as np

from tightfit.analysis.optimizer import sides_of_update
from tightfit.analysis.profile import Profile
from tightfit.cost.host_python import HostWork, microseconds
from tightfit.cost.steps import step_operators
from tightfit.planner.option import Change, Option
from tightfit.planner.sides import Sides
from tightfit.simulate.step_work import priced
from tightfit.simulate.timeline import seconds_of_step
from tightfit.tape import Column, CopyDirection, Phase, Tape, WaitKind
from tightfit.techniques.technique import AbstractTechnique, ChosenOption
from tightfit.units import KIB

if TYPE_CHECKING:
    from tightfit.techniques.session import Session

_ALIGNMENT = 512
"""Of each tensor in a ring, and of blocks of the caching allocator."""
NUM_BATCHES = 2
"""In the ring at the host: one that is being copied, and the one that comes."""
LEAST_SHARE = 0.01
"""Of a step: what saves less is not worth the memory."""
_COPY = "aten._to_copy"


@final
class AsynchronousCopies(AbstractTechnique):
    """Trades host memory, and memory for a batch on the card, for the time in which the host waits for copies of batches."""

    name = "asynchronous_copies"
    exact = True
    exactness = "bit for bit: what is copied is what the batch was when the program asked for the copy"
    is_for_speed = True

    def options(self, profile: Profile) -> Iterable[Option]:
        """Two at most, where the host waits for copies in each step: in order with the computation, or beside it with memory for a batch on the card."""
        tape = profile.tape
        # Before the first one the model is copied, and there is no plan yet.
        ranges = step_operators(tape)[1:]
        if not ranges or _orders_by_waiting(tape):
            return
        rows = _waited_for(tape, *ranges[-1])
        if not len(rows):
            return
        plain = seconds_of_step(priced(tape, profile.device))
        batch_bytes = max(_rounded(tape, _waited_for(tape, *each)) for each in ranges)
        for card_bytes in (0, batch_bytes):
            changed = _without_waiting(tape, rows, is_beside=bool(card_bytes))
            seconds = seconds_of_step(priced(changed, profile.device)) - plain
            if card_bytes:
                seconds += sides_of_update(profile.optimizer, 2 * card_bytes, len(rows)).on_card
            if seconds < -LEAST_SHARE * plain:
                yield Option(
                    technique=self.name,
                    where="batches",
                    settings={"host_bytes": NUM_BATCHES * batch_bytes, "card_bytes": card_bytes},
                    changes=_ring(profile, card_bytes),
                    seconds=seconds,
                    sides=Sides.both(seconds),
                    exact=True,
                    slots=frozenset({"batches"}),
                    host_bytes=NUM_BATCHES * batch_bytes,
                )

    def apply(self, session: "Session", chosen: Sequence[ChosenOption]) -> None:
        """Makes the copies that the program asks for outside of its model."""
        from tightfit.techniques.offload.apply_asynchronous_copies import apply_asynchronous_copies

        apply_asynchronous_copies(session, chosen)


def _orders_by_waiting(tape: Tape) -> bool:
    """Whether the program may count on it that every copy to the card waits: for other streams, or for copies to the host that nothing else waits for."""
    copies = tape.copies
    to_host = copies.direction == CopyDirection.TO_HOST
    return len(np.unique(tape.operators.stream)) > 1 or bool((to_host & ~copies.is_blocking.astype(bool)).any())


def _waited_for(tape: Tape, begin: int, end: int) -> Column:
    """The rows of the copies to the card that the host waits for in a step, outside of modules."""
    copies, operators = tape.copies, tape.operators
    first, last = np.searchsorted(copies.operator, (begin, end))
    own = np.arange(first, last)
    of = copies.operator[own]
    is_waited = (copies.direction[own] == CopyDirection.TO_CARD) & copies.is_blocking[own].astype(bool)
    is_move = np.array([tape.strings[name].startswith(_COPY) for name in operators.name[of].tolist()], dtype=bool)
    is_outside = np.array([not tape.strings[module] for module in operators.module[of].tolist()], dtype=bool)
    return own[is_waited & is_move & is_outside]


def _rounded(tape: Tape, rows: Column) -> int:
    return int((-(-tape.copies.num_bytes[rows] // _ALIGNMENT) * _ALIGNMENT).sum())


def _ring(profile: Profile, card_bytes: int) -> tuple[Change, ...]:
    """What a ring on the card holds from the first forward pass on."""
    forwards = np.flatnonzero(profile.tape.operators.phase == Phase.FORWARD)
    if not card_bytes or not len(forwards):
        return ()
    begin = int(profile.lifetimes.event_of(int(forwards[0])))
    return (Change(begin=begin, end=len(profile.tape.events), num_bytes=card_bytes),)


def _without_waiting(tape: Tape, rows: Column, *, is_beside: bool) -> Tape:
    """With these copies from page-locked memory and waited for by what is computed next alone; the host copies their bytes before. `is_beside` the computation,
    on a stream of their own."""
    copies, operators, waits = tape.copies, tape.operators, tape.waits
    is_pinned, is_blocking, stream = copies.is_pinned.copy(), copies.is_blocking.copy(), operators.stream.copy()
    is_pinned[rows], is_blocking[rows] = True, False
    beside, event = int(stream.max(initial=0)) + 1, int(waits.event.max(initial=0)) + 1
    added: list[tuple[int, int, int, int]] = []
    for number, row in enumerate(rows.tolist()):
        operator = int(copies.operator[row])
        added.append((WaitKind.HOST_UPDATES, operator, -1, -(-2 * int(copies.num_bytes[row]) // KIB)))
        added.append((WaitKind.HOST_RUNS, operator, -1, microseconds(HostWork.BATCH_COPY)))
        if is_beside:
            added.append((WaitKind.RECORD, operator + 1, beside, event + number))
            added.append((WaitKind.STREAM_FOR_EVENT, operator + 1, int(stream[operator]), event + number))
    if is_beside:
        stream[copies.operator[rows]] = beside
    new = np.array(added, dtype=np.int64)
    # The host copies once the step before has let it go, and events are recorded at once.
    is_record = np.isin(new[:, 0], (WaitKind.RECORD, WaitKind.STREAM_FOR_EVENT))
    first, last = (np.searchsorted(waits.operator, new[:, 1], side=side) for side in ("left", "right"))
    at = np.where(is_record, first, last)
    columns = ("kind", "operator", "stream", "event")
    joined = {name: np.insert(getattr(waits, name), at, new[:, i]) for i, name in enumerate(columns)}
    return dataclasses.replace(
        tape,
        copies=dataclasses.replace(copies, is_pinned=is_pinned, is_blocking=is_blocking),
        operators=dataclasses.replace(operators, stream=stream),
        waits=type(waits).from_columns(joined),
    )
