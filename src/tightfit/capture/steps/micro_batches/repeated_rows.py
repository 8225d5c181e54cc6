"""A stretch of the tape that is compared with another one, and written again: operators, storages, events, the sizes of products, cached casts, and what the
host reads.

Numbers of operators and storages are counted from where the stretch begins, so that the same work twice has the same rows. A stretch with
copies, collectives, side streams or other events is not repeated here.
"""

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any

from tightfit.capture.observe.recorder import Recorder
from tightfit.tape import EventKind, WaitKind

_WAITS = (WaitKind.HOST_READS, WaitKind.HOST_RUNS)


class Whose(enum.IntEnum):
    """What the number of a storage is counted from: the beginning of the stretch (what was there just before it is negative), that of the forward pass whose backward
    pass it is, or the arguments of that one."""

    OWN = 0
    FORWARD = 1
    GIVEN = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TapePlace:
    """A place on the tape, as the numbers of rows before it; `others` counts what is not repeated."""

    operators: int
    storages: int
    events: int
    products: int
    casts: int
    waits: int
    others: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedRows:
    """What was recorded between two places. Columns are in the recorder's order. An event is its kind, whose its storage is, the numbers of this and of
    the operator. `products` are rows of `Recorder.geometry`, `casts` the entries of `CastLog`, `waits` those of `WaitLog`.
    """

    operators: tuple[tuple[Any, ...], ...]
    storages: tuple[tuple[Any, ...], ...]
    events: tuple[tuple[int, Whose, int, int], ...]
    products: tuple[tuple[int, ...], ...]
    casts: tuple[tuple[int, bool | None], ...]
    waits: tuple[tuple[int, ...], ...]

    @property
    def num_storages(self) -> int:
        """How many storages were allocated."""
        return len(self.storages[0])

    def num_bytes(self, number: int) -> int:
        """The size of one of them."""
        return int(self.storages[0][number])

    def left(self) -> set[int]:
        """The storages that were allocated and not freed."""
        return set(range(self.num_storages)) - self.freed(Whose.OWN)

    def freed(self, whose: Whose) -> set[int]:
        """The storages that were freed."""
        return {number for kind, each, number, _ in self.events if kind == EventKind.FREE and each is whose}


def place_on(recorder: Recorder) -> TapePlace:
    """The end of the tape so far."""
    communication = recorder.communication
    return TapePlace(
        operators=recorder.num_operators,
        storages=len(recorder.storages["num_bytes"]),
        events=len(recorder.events["kind"]),
        products=len(recorder.geometry),
        casts=len(recorder.casts.entries),
        waits=recorder.waits.number,
        others=(
            *(len(recorder.copies["operator"]), len(recorder.spans), recorder.disk.num_bytes),
            *(len(communication.collectives["operator"]), len(communication.groups)),
        ),
    )


def rows_between(
    recorder: Recorder,
    begin: TapePlace,
    end: TapePlace,
    forward: tuple[int, int] | None = None,
    given: Mapping[int, int] | None = None,
) -> RepeatedRows | None:
    """The rows from `begin` to `end`, or None if they are not to be repeated. `forward`: the first storage of the forward pass, and the first behind it. `given` are
    the numbers of its arguments by their storages.
    """
    waits = list(zip(*(column[begin.waits : end.waits] for column in recorder.waits.columns.values()), strict=True))
    if begin.others != end.others or any(kind not in _WAITS for kind, *_ in waits):
        return None
    columns = recorder.events
    events = []
    for at in range(begin.events, end.events):
        kind, storage = columns["kind"][at], columns["storage"][at]
        if kind not in (EventKind.ALLOCATE, EventKind.FREE):
            return None
        if storage >= begin.storages or (forward is not None and storage >= forward[1]):
            whose, number = Whose.OWN, storage - begin.storages
        elif forward is not None and storage >= forward[0]:
            whose, number = Whose.FORWARD, storage - forward[0]
        elif given is not None and storage in given:
            whose, number = Whose.GIVEN, given[storage]
        else:
            return None
        events.append((int(kind), whose, number, columns["operator"][at] - begin.operators))
    rows = slice(begin.storages, end.storages)
    return RepeatedRows(
        operators=tuple(tuple(c[begin.operators : end.operators]) for c in recorder.operators.values()),
        storages=tuple(
            tuple(number - begin.operators for number in column[rows]) if name == "operator" else tuple(column[rows])
            for name, column in recorder.storages.items()
        ),
        events=tuple(events),
        products=tuple(
            (number - begin.operators, *sizes) for number, *sizes in recorder.geometry[begin.products : end.products]
        ),
        casts=tuple(
            (number - (begin.operators if is_of_module is None else begin.events), is_of_module)
            for number, is_of_module in recorder.casts.entries[begin.casts : end.casts]
        ),
        waits=tuple((kind, operator - begin.operators, *rest) for kind, operator, *rest in waits),
    )


def write_again(recorder: Recorder, rows: RepeatedRows, first_of_forward: int = 0, given: Sequence[int] = ()) -> int:
    """Appends the rows to the tape; returns the number of their first storage. `first_of_forward` is that of the forward pass, `given` are the storages of its
    arguments."""
    first, operators = len(recorder.storages["num_bytes"]), recorder.num_operators
    first_event = len(recorder.events["kind"])
    for column, values in zip(recorder.operators.values(), rows.operators, strict=True):
        column.extend(values)
    recorder.num_operators += len(rows.operators[0])
    for (name, column), values in zip(recorder.storages.items(), rows.storages, strict=True):
        column.extend([number + operators for number in values] if name == "operator" else values)
    events = recorder.events
    firsts = {Whose.OWN: first, Whose.FORWARD: first_of_forward}
    for kind, whose, number, operator in rows.events:
        events["kind"].append(kind)
        events["storage"].append(given[number] if whose is Whose.GIVEN else firsts[whose] + number)
        events["operator"].append(operator + operators)
        events["value"].append(0)
    recorder.geometry.extend((number + operators, *sizes) for number, *sizes in rows.products)
    for number, is_of_module in rows.casts:
        recorder.casts.entries.append((number + (operators if is_of_module is None else first_event), is_of_module))
    for kind, operator, *rest in rows.waits:
        for column, value in zip(recorder.waits.columns.values(), (kind, operator + operators, *rest), strict=True):
            column.append(value)
    return first
