"""The numbers that cards, processes and their series have in a store: looked up, or made up and written with the next samples."""

import dataclasses
import json
import sqlite3

from tightfit.watch.readings import CardReading, ProcessFacts

_Row = tuple[str, tuple[object, ...]]
_CARD = "INSERT INTO cards (id, uuid, reading, time) VALUES (?, ?, ?, 0)"
_PROCESS = "INSERT INTO processes (id, pid, identity, started, user, command, container) VALUES (?, ?, ?, ?, ?, ?, ?)"
_SERIES = "INSERT INTO series (id, kind, card, process, last) VALUES (?, ?, ?, ?, ?)"


@dataclasses.dataclass(slots=True)
class _Known:
    number: int
    row: _Row
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
        # By what can be told apart at once: a number of a card or a process is looked up for new series alone.
        key = ("series", kind, card.uuid, *((process.pid, process.identity) if process else ()))
        known = self._known.get(key)
        if known is not None:
            known.is_used = True
            return known.number
        card_number = self._card(card)
        process_number = self._process(process) if process else 0
        where = "kind = ? AND card = ? AND process = ?", (kind, card_number, process_number)
        return self._number(key, "series", where, _SERIES, (kind, card_number, process_number, time))

    def forget_unused(self) -> None:
        """Forgets the names that nobody has asked for since the last call."""
        self._known = {key: known for key, known in self._known.items() if known.is_used or key[0] == "card"}
        for known in self._known.values():
            known.is_used = False

    def move_to(self, connection: sqlite3.Connection) -> None:
        """Goes on with another, empty store, in which the names that are known keep their numbers."""
        self._connection = connection
        self.new = [known.row for known in self._known.values()]

    def _card(self, card: CardReading) -> int:
        where = "uuid = ?", (card.uuid,)
        return self._number(
            ("card", card.uuid), "cards", where, _CARD, (card.uuid, json.dumps(dataclasses.asdict(card)))
        )

    def _process(self, process: ProcessFacts) -> int:
        row = (
            process.pid,
            process.identity,
            process.started,
            process.user,
            process.command,
            process.container,
        )
        where = "pid = ? AND identity = ?", (process.pid, process.identity)
        return self._number(("process", process.pid, process.identity), "processes", where, _PROCESS, row)

    def _number(
        self,
        key: tuple[object, ...],
        table: str,
        where: tuple[str, tuple[object, ...]],
        statement: str,
        row: tuple[object, ...],
    ) -> int:
        known = self._known.get(key)
        if known is not None:
            known.is_used = True
            return known.number
        found = self._connection.execute(f"SELECT id FROM {table} WHERE {where[0]}", where[1]).fetchone()
        number = found[0] if found else self._next[table]
        if not found:
            self._next[table] += 1
            self.new.append((statement, (number, *row)))
        self._known[key] = _Known(number, (statement, (number, *row)))
        return number
