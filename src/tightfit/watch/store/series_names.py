"""The numbers that cards, processes and their series have in a store: looked up, or made up and written with the next samples."""

import dataclasses
import json
import sqlite3
from collections.abc import Mapping

from tightfit.watch.machine.readings import CardReading, ProcessFacts

_Row = tuple[str, tuple[object, ...]]
# A store that has taken the place of another one is given rows anew, some of them more than once.
_CARD = "INSERT OR IGNORE INTO cards (id, uuid, reading, time) VALUES (?, ?, ?, 0)"
_PROCESS = "INSERT OR IGNORE INTO processes (id, pid, identity, started, user, command, container) VALUES (?, ?, ?, ?, ?, ?, ?)"
_SERIES = "INSERT OR IGNORE INTO series (id, kind, card, process, last) VALUES (?, ?, ?, ?, ?)"


@dataclasses.dataclass(slots=True)
class _Known:
    """A number, and the rows that a store needs for it."""

    number: int
    rows: tuple[_Row, ...]
    is_used: bool = True


class SeriesNames:
    """Numbers for names, of which only those in use are remembered. `new` are rows that the store does not have yet."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.new: list[_Row] = []
        self._connection = connection
        self._known: dict[tuple[object, ...], _Known] = {}
        self._next = {
            table: connection.execute(f"SELECT coalesce(max(id), 0) + 1 FROM {table}").fetchone()[0]
            for table in ("cards", "processes", "series")
        }

    def series(self, kind: str, card: CardReading, process: ProcessFacts | None, time: int) -> int:
        """The number of a series: the memory of `card`, or of `process` on it; `time` is that of its sample.

        Raises:
            sqlite3.Error: the store does not say now whether it knows the name.
        """
        key = (kind, card.uuid) if process is None else (kind, card.uuid, process.pid, process.identity)
        known = self._known.get(key)
        if known is None:
            # A number of a card or a process is looked up for new series alone.
            known = self._known[key] = self._new_series(kind, card, process, time)
        known.is_used = True
        return known.number

    def forget_unused(self) -> None:
        """Forgets the names that nobody has asked for since the last call."""
        self._known = {key: known for key, known in self._known.items() if known.is_used}
        for known in self._known.values():
            known.is_used = False

    def move_to(self, connection: sqlite3.Connection) -> None:
        """Goes on with another, empty store, in which the names that are known keep their numbers."""
        self._connection = connection
        self.new = [row for known in self._known.values() for row in known.rows]

    def _new_series(self, kind: str, card: CardReading, process: ProcessFacts | None, time: int) -> _Known:
        reading = json.dumps(dataclasses.asdict(card))
        of_card = self._number("cards", {"uuid": card.uuid}, _CARD, (card.uuid, reading))
        number, rows = 0, of_card.rows
        if process is not None:
            names = {"pid": process.pid, "identity": process.identity}
            facts = (process.started, process.user, process.command, process.container)
            of_process = self._number("processes", names, _PROCESS, (*names.values(), *facts))
            number, rows = of_process.number, (*rows, *of_process.rows)
        names = {"kind": kind, "card": of_card.number, "process": number}
        found = self._number("series", names, _SERIES, (*names.values(), time))
        return _Known(found.number, (*rows, *found.rows))

    def _number(self, table: str, names: Mapping[str, object], statement: str, values: tuple[object, ...]) -> _Known:
        """The number that `names` (columns and values) have in a table, or will have."""
        key = (table, *names.values())
        known = self._known.get(key)
        if known is None:
            where = " AND ".join(f"{column} = ?" for column in names)
            found = self._connection.execute(f"SELECT id FROM {table} WHERE {where}", tuple(names.values())).fetchone()
            number = found[0] if found else self._next[table]
            known = self._known[key] = _Known(number, ((statement, (number, *values)),))
            if not found:
                self._next[table] += 1
                self.new += known.rows
        known.is_used = True
        return known
