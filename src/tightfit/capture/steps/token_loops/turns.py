"""The rows that a turn of a loop has left on the tape, in a form that can be compared with those of other turns.

Two parts: what must be the same in all turns, and numbers that may grow by the same from turn to turn. Storages are counted backwards from where the turn
begins, so that a turn that frees what the one before allocated says so in the same words as the next. The scratch of kernels is left out: how much an attention kernel
takes at a length is a rule of its own.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from tightfit.capture.observe.recorder import Recorder
from tightfit.tape import Column, Geometry, Source

_GROWING = {
    "operators": ("flops", "bytes_read", "bytes_written"),
    "storages": ("num_bytes", "low_bytes", "high_bytes"),
    "copies": ("num_bytes",),
}
_LEFT_ALONE = {"storages": ("category",)}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The end of the tape at the beginning of a turn, as numbers of rows. `others` are the numbers of what is never repeated, `live` the storages that are alive then."""

    operators: int
    storages: int
    events: int
    copies: int
    waits: int
    geometry: int
    others: tuple[int, ...]
    live: frozenset[int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What a turn, or several, left: `same` is equal in turns that are alike, `growing` are numbers. `num_rows` counts scratch too."""

    same: tuple[tuple[int, ...], ...]
    growing: Column
    num_rows: tuple[int, ...]


def place_on(recorder: Recorder, live: Sequence[int]) -> Place:
    """The end of the tape so far."""
    return Place(
        operators=recorder.num_operators,
        storages=len(recorder.storages["num_bytes"]),
        events=len(recorder.events["kind"]),
        copies=len(recorder.copies["operator"]),
        waits=recorder.waits.number,
        geometry=len(recorder.geometry),
        others=(
            len(recorder.spans),
            len(recorder.casts.entries),
            len(recorder.communication.collectives["operator"]),
            recorder.disk.num_bytes,
            recorder.host.peak_bytes,
            recorder.stream,
        ),
        live=frozenset(live),
    )


def turn_between(recorder: Recorder, first: Place, begin: Place, end: Place) -> Turn | None:
    """What was done from `begin` to `end`; None for what cannot be repeated. A storage from before `first` is the same one in all turns."""
    # Events of streams are counted on, and what waits for one would wait for another.
    if begin.others != end.others or any(
        event >= 0 for event in recorder.waits.columns["event"][begin.waits : end.waits]
    ):
        return None
    kept = np.asarray(recorder.storages["source"][first.storages : end.storages]) != Source.SCRATCH
    rank = np.concatenate([[0], np.cumsum(kept)])
    own = kept[begin.storages - first.storages :]
    operators = {name: recorder.operators[name][begin.operators : end.operators] for name in recorder.operators}
    storages = {
        name: np.asarray(column[begin.storages : end.storages])[own] for name, column in recorder.storages.items()
    }
    storages["operator"] = storages["operator"] - begin.operators
    events = {name: np.asarray(column[begin.events : end.events]) for name, column in recorder.events.items()}
    events["operator"] = events["operator"] - begin.operators
    at = events["storage"] - first.storages
    is_of_turns = at >= 0
    is_scratch = is_of_turns & ~kept[np.where(is_of_turns, at, 0)] if len(kept) else is_of_turns
    back = rank[begin.storages - first.storages] - rank[np.where(is_of_turns, at, 0)]
    events["storage"] = np.where(is_of_turns, back, events["storage"])
    events["is_of_turns"] = is_of_turns
    copies = {name: recorder.copies[name][begin.copies : end.copies] for name in recorder.copies}
    copies["operator"] = [operator - begin.operators for operator in copies["operator"]]
    waits = {name: recorder.waits.columns[name][begin.waits : end.waits] for name in recorder.waits.columns}
    waits["operator"] = [operator - begin.operators for operator in waits["operator"]]
    products = np.asarray(recorder.geometry[begin.geometry : end.geometry], dtype=np.int64).reshape(
        end.geometry - begin.geometry, len(dataclasses.fields(Geometry))
    )
    same: list[tuple[int, ...]] = []
    growing: list[Column] = []
    tables = {"operators": operators, "storages": storages, "copies": copies, "waits": waits}
    for table, columns in tables.items():
        for name, column in columns.items():
            if name in _GROWING.get(table, ()):
                growing.append(np.asarray(column, dtype=np.float64))
            elif name not in _LEFT_ALONE.get(table, ()):
                same.append(tuple(np.asarray(column).tolist()))
    same += [tuple(column[~is_scratch].tolist()) for column in events.values()]
    same.append(tuple((products[:, 0] - begin.operators).tolist()) if len(products) else ())
    growing.append(products[:, 1:].astype(np.float64).reshape(-1))
    return Turn(
        same=tuple(same),
        growing=np.concatenate(growing),
        num_rows=tuple(
            getattr(end, name) - getattr(begin, name)
            for name in ("operators", "storages", "events", "copies", "waits", "geometry")
        ),
    )


def are_alike(turns: Sequence[Turn]) -> bool:
    """Whether three turns do the same, with numbers that grow by the same from each to the next."""
    first, second, third = turns
    if first.same != second.same or second.same != third.same or second.num_rows != third.num_rows:
        return False
    return bool(np.array_equal(third.growing - second.growing, second.growing - first.growing))


def is_as_foretold(turn: Turn, before: Turn, last: Turn, number: int) -> bool:
    """Whether `turn` is what comes `number` turns behind `last`, which `before` was before."""
    if turn.same != last.same:
        return False
    return bool(np.array_equal(turn.growing, last.growing + number * (last.growing - before.growing)))


def moving(places: Sequence[Place]) -> tuple[int, ...] | None:
    """The storages alive at the last of four places that turns put others in the place of; None if they keep more and more, or keep one for long."""
    oldest, first, second, last = places

    def handed_on(begin: Place, end: Place) -> set[int]:
        return {storage - end.storages for storage in end.live if storage >= begin.storages}

    if any(oldest.storages <= storage < first.storages for storage in last.live):
        return None
    found = {storage for storage in last.live if storage >= first.storages}
    # By their distance from the end of their turn: the same ones must be alive at the end of each.
    if handed_on(first, last) != handed_on(oldest, second):
        return None
    return tuple(sorted(found))
