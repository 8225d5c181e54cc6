"""Turns of a loop that a trace left out, since they do what the turns before them did with sizes that grow by the same each time.

The trace has the turns before and after; here the ones between are put into its tape, row by row: what is a size or a number of a row grows by what it grew from the
turns before the last ones traced to these, all else is as in these.
"""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

if TYPE_CHECKING:
    from tightfit.tape.columns import Column, Table, Tape
    from tightfit.tape.loader_use import LoaderUse

Range = tuple[int, int]
_AnyTable = TypeVar("_AnyTable", bound="Table")
_SCRATCH = 1  # `Source.SCRATCH`, which is not imported as the columns import this


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """`number` repetitions of these rows `[begin, end)` of a tape follow them; as many rows like them are before them.

    What refers to the `moving` storages later means those of the last repetition.
    """

    number: int
    operators: Range
    storages: Range
    events: Range
    copies: Range
    waits: Range
    geometry: Range
    moving: tuple[int, ...]

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "LeftOut":
        """Reads what `dataclasses.asdict` and JSON have made of one."""
        ranges = {name: tuple(value) for name, value in values.items() if name != "number"}
        return cls(number=values["number"], **ranges)


def with_left_out(tape: "Tape") -> "Tape":
    """The tape with all turns; the same one where none were left out."""
    # From the last one on, so that the rows of those before keep their numbers.
    for left_out in reversed(tape.left_out):
        tape = _with(tape, left_out)
    return dataclasses.replace(tape, left_out=()) if tape.left_out else tape


def _with(tape: "Tape", left: LeftOut) -> "Tape":
    more_operators, more_storages, more_events = (
        left.number * (end - begin) for begin, end in (left.operators, left.storages, left.events)
    )
    (_, end_of_operators), (_, end_of_storages), (_, end_of_events) = left.operators, left.storages, left.events

    def later(number: "Column", end: int, more: int) -> "Column":
        return np.where(number >= end, number + more, number).astype(number.dtype)

    def behind(table: _AnyTable, *, from_row: int) -> _AnyTable:
        """The table whose numbers of operators from that row on are counted with the turns."""
        operator = np.array(table.operator)  # type: ignore[attr-defined]
        operator[from_row:] += more_operators
        return dataclasses.replace(table, operator=operator)

    moving = np.zeros(len(tape.storages), dtype=bool)
    moving[list(left.moving)] = True
    events = behind(tape.events, from_row=end_of_events)
    storage = np.array(events.storage)
    rest = storage[end_of_events:]
    means_another = (rest >= end_of_storages) | ((rest >= 0) & moving[np.maximum(rest, 0)])
    storage[end_of_events:] = rest + np.where(means_another, more_storages, 0)
    storages = behind(tape.storages, from_row=end_of_storages)
    is_scratch = storages.source[slice(*left.storages)] == _SCRATCH
    spans = dataclasses.replace(
        tape.spans,
        begin=later(tape.spans.begin, end_of_events, more_events),
        end=later(tape.spans.end, end_of_events, more_events),
    )
    weights = tape.weights
    return dataclasses.replace(
        tape,
        operators=_repeated(tape.operators, left.operators, left.number),
        # Scratch of kernels follows rules of its own, and stays as it was in the turns that were traced.
        storages=_repeated(storages, left.storages, left.number, stays=is_scratch),
        events=_repeated(dataclasses.replace(events, storage=storage), left.events, left.number),
        copies=_repeated(behind(tape.copies, from_row=left.copies[1]), left.copies, left.number),
        waits=_repeated(behind(tape.waits, from_row=left.waits[1]), left.waits, left.number),
        geometry=_repeated(behind(tape.geometry, from_row=left.geometry[1]), left.geometry, left.number),
        collectives=dataclasses.replace(
            tape.collectives, operator=later(tape.collectives.operator, end_of_operators, more_operators)
        ),
        casts=dataclasses.replace(
            tape.casts,
            operator=later(tape.casts.operator, end_of_operators, more_operators),
            end=later(tape.casts.end, end_of_events, more_events),
        ),
        weights=dataclasses.replace(weights, storage=later(weights.storage, end_of_storages, more_storages)),
        spans=spans,
        operators_of_steps=tuple(
            (_later(begin, end_of_operators, more_operators), _later(end, end_of_operators, more_operators))
            for begin, end in tape.operators_of_steps
        ),
        loaders=tuple(_with_batches(loader, left) for loader in tape.loaders),
    )


def _with_batches(loader: "LoaderUse", left: LeftOut) -> "LoaderUse":
    """With the batches of the turns that were left out: each takes as many as the last one traced."""
    begin, end = left.operators
    # Tapes from before examples were noted have none.
    known = loader.examples or (0,) * len(loader.batches)
    rows = list(zip(loader.batches, known, strict=True))
    again = [(at + n * (end - begin), num) for at, num in rows if begin <= at < end for n in range(1, left.number + 1)]
    every = sorted([*again, *((_later(at, end, left.number * (end - begin)), num) for at, num in rows)])
    examples = tuple(num for _, num in every) if loader.examples else ()
    return dataclasses.replace(loader, batches=tuple(at for at, _ in every), examples=examples)


def _later(number: int, end: int, more: int) -> int:
    return number + more if number >= end else number


def _repeated(table: _AnyTable, rows: Range, number: int, *, stays: "Column | None" = None) -> _AnyTable:
    """The table in which `number` repetitions of `rows` follow them. Where `stays`, sizes do not grow."""
    begin, end = rows
    length = end - begin
    if not length:
        return table
    columns = {}
    for name, column in table.columns().items():
        last = column[begin:end]
        grown = last - column[begin - length : begin] if last.dtype != bool else np.zeros(length, dtype=np.int8)
        if stays is not None and name.endswith("_bytes"):
            grown = np.where(stays, 0, grown)
        made = last if last.dtype == bool else last + np.arange(1, number + 1)[:, None] * grown
        made = np.broadcast_to(made, (number, length)).reshape(-1).astype(column.dtype)
        columns[name] = np.concatenate([column[:end], made, column[end:]])
    return type(table)(**columns)
