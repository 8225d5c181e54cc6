"""The invariants of a tape, as executable checks: tests run them on every tape, a capture on the one it made.

Each rule yields a sentence for each violation; an empty list means a valid tape.
"""

from collections.abc import Iterator

import numpy as np

from tightfit.tape.columns import (
    Category,
    CollectiveKind,
    CopyDirection,
    EffectKind,
    EventKind,
    Phase,
    Source,
    SpanKind,
    Tape,
    WaitKind,
)


def verify_tape(tape: Tape) -> list[str]:
    """Every broken rule of `tape`, as a sentence each."""
    # Columns of different lengths cannot be compared.
    if faults := list(_shapes(tape)):
        return faults
    # The columns below are indexed by storage, which needs valid indices and one allocation for each.
    return [
        fault
        for rule in (
            _names,
            _values,
            _lives,
            _order,
            _spans,
            _copies,
            _collectives,
            _waits,
            _weights,
            _geometry,
            _effects,
        )
        for fault in rule(tape)
    ]


def _shapes(tape: Tape) -> Iterator[str]:
    for name in ("operators", "storages", "events", "spans", "copies", "waits", "weights", "collectives", "geometry"):
        lengths = {column.shape for column in getattr(tape, name).columns().values()}
        if len(lengths) > 1 or any(len(shape) != 1 for shape in lengths):
            yield f"the columns of {name} have different shapes: {sorted(lengths)}"


def _names(tape: Tape) -> Iterator[str]:
    for table, columns in (
        (tape.operators, ("name", "module", "line", "dtype")),
        (tape.spans, ("name",)),
        (tape.weights, ("module",)),
    ):
        for column in columns:
            indices = getattr(table, column)
            if len(indices) and not (indices.min() >= 0 and indices.max() < len(tape.strings)):
                yield f"{type(table).__name__}.{column} points outside the strings"


def _values(tape: Tape) -> Iterator[str]:
    for column, allowed in (
        (tape.operators.phase, Phase),
        (tape.storages.category, Category),
        (tape.storages.source, Source),
        (tape.events.kind, EventKind),
        (tape.spans.kind, SpanKind),
        (tape.copies.direction, CopyDirection),
        (tape.waits.kind, WaitKind),
        (tape.collectives.kind, CollectiveKind),
    ):
        if not np.isin(column, list(allowed)).all():
            yield f"a value that is no {allowed.__name__}"
    storages = tape.storages
    # The likely size may be 0, as cuDNN often takes no workspace; then only the high end says that there may be one.
    if (storages.num_bytes < 0).any() or (storages.high_bytes <= 0).any():
        yield "a storage of no bytes"
    if (
        (storages.low_bytes < 0).any()
        or (storages.low_bytes > storages.num_bytes).any()
        or (storages.num_bytes > storages.high_bytes).any()
    ):
        yield "a storage whose likely size lies outside its range"
    for column in ("flops", "bytes_read", "bytes_written"):
        # Written so that NaN fails too.
        if not (getattr(tape.operators, column) >= 0).all():
            yield f"a negative or undefined {column}"
    operators = tape.storages.operator
    if len(operators) and not (operators.min() >= -1 and operators.max() < len(tape.operators)):
        yield "a storage born of an operator that does not exist"


def _lives(tape: Tape) -> Iterator[str]:
    events, num_storages = tape.events, len(tape.storages)
    concerns = np.isin(events.kind, (EventKind.ALLOCATE, EventKind.FREE, EventKind.USE))
    outside = (events.storage[concerns] < 0) | (events.storage[concerns] >= num_storages)
    if outside.any():
        yield "an event about a storage that does not exist"
        return
    position = np.arange(len(events))
    allocations, deaths = events.kind == EventKind.ALLOCATE, events.kind == EventKind.FREE
    if not (np.bincount(events.storage[allocations], minlength=num_storages) == 1).all():
        yield "a storage that is not born exactly once"
        return
    if (np.bincount(events.storage[deaths], minlength=num_storages) > 1).any():
        yield "a storage that is freed twice"
    allocated_at = np.empty(num_storages, dtype=np.int64)
    allocated_at[events.storage[allocations]] = position[allocations]
    freed_at = np.full(num_storages, len(events), dtype=np.int64)
    freed_at[events.storage[deaths]] = position[deaths]
    if (freed_at <= allocated_at).any():
        yield "a storage that is freed before it is born"
    uses = events.kind == EventKind.USE
    used, at = events.storage[uses], position[uses]
    if ((at < allocated_at[used]) | (at > freed_at[used])).any():
        yield "a storage that is used while it is not alive"


def _order(tape: Tape) -> Iterator[str]:
    if (np.diff(tape.events.operator) < 0).any():
        yield "events go back in the order of operators"
    if len(tape.events) and not (tape.events.operator.min() >= 0 and tape.events.operator.max() <= len(tape.operators)):
        yield "an event among operators that do not exist"


def _spans(tape: Tape) -> Iterator[str]:
    begin, end = tape.spans.begin, tape.spans.end
    if (begin > end).any() or (begin[1:] < end[:-1]).any():
        yield "spans that overlap or run backwards"
    if len(end) and (begin[0] < 0 or end[-1] > len(tape.events)):
        yield "a span outside the events"
    borders = [border for step in tape.operators_of_steps for border in step]
    if borders and (borders != sorted(borders) or borders[0] < 0 or borders[-1] > len(tape.operators)):
        yield "steps that overlap, or outside the operators"
    if borders and len(tape.operators_of_steps) != int((tape.spans.kind == SpanKind.STEP).sum()):
        yield "more or fewer steps of operators than spans of steps"


def _copies(tape: Tape) -> Iterator[str]:
    operator = tape.copies.operator
    if len(operator) and not (operator.min() >= 0 and operator.max() < len(tape.operators)):
        yield "a copy of an operator that does not exist"
    if (np.diff(operator) <= 0).any():
        yield "copies that are out of order, or two of one operator"
    if (tape.copies.num_bytes < 0).any():
        yield "a copy of a negative number of bytes"


def _collectives(tape: Tape) -> Iterator[str]:
    table = tape.collectives
    if len(table) and not (table.operator.min() >= 0 and table.operator.max() < len(tape.operators)):
        yield "a collective of an operator that does not exist"
    if (np.diff(table.operator) <= 0).any():
        yield "collectives that are out of order, or two of one operator"
    if (table.num_bytes < 0).any():
        yield "a collective of a negative number of bytes"
    sizes = [len(ranks) for ranks in tape.communicators]
    if any(
        not 0 <= group < len(sizes) or sizes[group] != size
        for group, size in zip(table.group, table.group_size, strict=True)
    ):
        yield "a collective of a group that does not exist, or has other members"
    if not 0 <= tape.rank < tape.num_ranks or any(
        max(ranks) >= tape.num_ranks for ranks in tape.communicators if ranks
    ):
        yield "a rank that does not exist"


def _weights(tape: Tape) -> Iterator[str]:
    storage = tape.weights.storage
    if len(storage) and not (storage.min() >= 0 and storage.max() < len(tape.storages)):
        yield "a weight in a storage that does not exist"


def _geometry(tape: Tape) -> Iterator[str]:
    geometry = tape.geometry
    operator = geometry.operator
    if len(operator) and not (operator.min() >= 0 and operator.max() < len(tape.operators)):
        yield "sizes of an operator that does not exist"
    if (np.diff(operator) <= 0).any():
        yield "sizes that are out of order, or two of one operator"
    for column in ("batch", "num_rows", "num_columns", "depth", "taps", "images"):
        if (getattr(geometry, column) < 0).any():
            yield f"sizes with a negative {column}"


def _waits(tape: Tape) -> Iterator[str]:
    waits = tape.waits
    if (np.diff(waits.operator) < 0).any():
        yield "waits go back in the order of operators"
    if len(waits) and not (waits.operator.min() >= 0 and waits.operator.max() <= len(tape.operators)):
        yield "a wait among operators that do not exist"
    if (np.isin(waits.kind, _OF_EVENTS) != (waits.event >= 0)).any():
        yield "a wait for an event without the event, or another with one"
    if (np.isin(waits.kind, _OF_STREAMS) != (waits.stream >= 0)).any():
        yield "a wait of a stream without the stream, or another with one"


_OF_EVENTS = (
    WaitKind.RECORD,
    WaitKind.STREAM_FOR_EVENT,
    WaitKind.HOST_FOR_EVENT,
    WaitKind.HOST_UPDATES,
    WaitKind.HOST_RUNS,
)
_OF_STREAMS = (WaitKind.RECORD, WaitKind.STREAM_FOR_EVENT, WaitKind.HOST_FOR_STREAM, WaitKind.HOST_READS)


def _effects(tape: Tape) -> Iterator[str]:
    of_program = list(EffectKind)[list(EffectKind).index(EffectKind.GRADIENT) :]
    for effect in tape.effects:
        if not effect.what:
            yield f"an effect of {effect.module or 'the program'} that does not say what it is"
        if (effect.kind in of_program) is bool(effect.module):
            yield f"an effect of the kind '{effect.kind}' of {effect.module or 'no module'}"
