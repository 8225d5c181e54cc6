"""Writes a history, one transaction a reading, and goes on when it cannot: readings wait while the file is locked, old history goes when the disk is full."""

import contextlib
import dataclasses
import json
import sqlite3
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tightfit.watch.machine.machine_state import Episode, Outlook
from tightfit.watch.machine.readings import CardReading
from tightfit.watch.store.history_file import NO_DATABASE, PRIMARY, HistoryFile, is_damage
from tightfit.watch.store.levels import Retention, drop_ended, drop_old, roll_up
from tightfit.watch.store.reserve import Reserve
from tightfit.watch.store.schema import SPANS
from tightfit.watch.store.series_names import SeriesNames

_MAX_WAITING = 600
_MAX_SKIPPED = 31
_NO_SPACE = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
_OF_THE_MACHINE = (
    *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN),
    *(sqlite3.SQLITE_PERM, sqlite3.SQLITE_PROTOCOL),
)
_NUM_EPISODES = 1000
_OUTLOOK = f"INSERT OR REPLACE INTO outlooks (series, {', '.join(Outlook.__slots__)}) VALUES (?{', ?' * len(Outlook.__slots__)})"
_EPISODE = (
    "INSERT INTO episodes (rule, subject, message, fired_at, resolved_at) VALUES (?, ?, ?, ?, ?) "
    "ON CONFLICT (rule, subject, fired_at) DO UPDATE SET message = excluded.message, resolved_at = excluded.resolved_at"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TimedReading:
    """A reading as it is written: its time and what the wall clock said (milliseconds), the cards, and samples as (series, bytes)."""

    time: int
    wall: int
    cards: tuple[CardReading, ...]
    samples: list[tuple[int, int]]


class HistoryWriter:
    """The one writer of the history at `path`. `trouble` says why the last reading is not on disk; empty if it is."""

    def __init__(self, path: Path, *, max_bytes: int, retention: Retention) -> None:
        """Opens the history; a damaged one is set aside.

        Raises:
            WatchError: it is the history of another version, or another program's database.
            sqlite3.Error: it cannot be opened at all.
        """
        self._file, self._retention = HistoryFile(path, max_bytes=max_bytes), retention
        self._reserve = Reserve(path.with_name("reserve"))
        self._waiting: deque[TimedReading] = deque(maxlen=_MAX_WAITING)
        self._beside: deque[tuple[str, tuple[object, ...]]] = deque(maxlen=10 * _MAX_WAITING)
        self._num_to_skip = self._num_skipped = 0
        self.trouble = ""
        try:
            self._read()
        except sqlite3.DatabaseError as error:
            if not is_damage(error) or not self._file.begin_anew(is_damaged=True):
                raise
            self._read()
        self._reserve.fill()

    def _read(self) -> None:
        self.names = SeriesNames(self._file.connection)
        (last,) = self._file.connection.execute("SELECT max(time) FROM moments").fetchone()
        self.last_time: int = last or 0
        """The time of the last reading in the history, in milliseconds; 0 for a new one."""

    def add(self, moment: TimedReading | None, status: Mapping[str, Any]) -> None:
        """Writes a reading (None: there was none) with those that wait, and what readers are told of the agent. What cannot be written waits, ten minutes of it at most."""
        if moment is not None:
            self._waiting.append(moment)
        if self._num_skipped < self._num_to_skip:
            self._num_skipped += 1
            return
        self._num_skipped = 0
        try:
            if self._file.is_held_open():
                self._num_to_skip = _MAX_SKIPPED
                self.trouble = (
                    f"another program holds the history open and lets it grow; {len(self._waiting)} readings wait"
                )
                return
            self._write(status)
        except sqlite3.Error as error:
            # All that waits is tried each time: so less and less often.
            self._num_to_skip = min(2 * self._num_to_skip + 1, _MAX_SKIPPED)
            self._failed(error)
        else:
            self._num_to_skip, self.trouble = 0, ""

    def keep_outlooks(self, outlooks: Mapping[int, Outlook]) -> None:
        """Writes the forecasts of series, with the next reading."""
        for series, each in outlooks.items():
            self._beside.append((_OUTLOOK, (series, *(getattr(each, name) for name in Outlook.__slots__))))

    def keep_episodes(self, episodes: Iterable[Episode]) -> None:
        """Writes alerts that have begun or ended, with the next reading."""
        self._beside.extend((_EPISODE, (e.rule, e.subject, e.message, e.fired_at, e.resolved_at)) for e in episodes)

    def close(self) -> None:
        """Closes the file; SQLite then writes everything into it."""
        self._file.connection.close()

    def _write(self, status: Mapping[str, Any]) -> None:
        """All that waits, in one transaction.

        Raises:
            sqlite3.Error: it could not be written; nothing of it is.
        """
        connection = self._file.connection
        connection.execute("BEGIN IMMEDIATE")
        for statement, row in (*self.names.new, *self._beside):
            connection.execute(statement, row)
        for moment in self._waiting:
            connection.execute("INSERT INTO moments VALUES ('readings', ?, ?)", (moment.time, moment.wall))
            rows = ((moment.time, series, size) for series, size in moment.samples)
            connection.executemany("INSERT INTO readings VALUES (?, ?, ?)", rows)
        said = [(key, json.dumps(value)) for key, value in status.items()]
        connection.executemany("INSERT OR REPLACE INTO status VALUES (?, ?)", said)
        time = self._waiting[-1].time if self._waiting else self.last_time
        is_new_minute, is_new_hour = (self.last_time // SPANS[span] != time // SPANS[span] for span in SPANS)
        if self._waiting:
            self._write_cards(self._waiting[-1])
        if is_new_minute:
            roll_up(connection, time)
            drop_old(connection, self._retention)
        if is_new_hour:
            drop_ended(connection, time)
            connection.execute("DELETE FROM episodes WHERE id <= (SELECT max(id) FROM episodes) - ?", (_NUM_EPISODES,))
        connection.execute("COMMIT")
        self.names.new.clear()
        self._beside.clear()
        self._waiting.clear()
        self.last_time = time
        if is_new_minute:
            self._look_after()

    def _write_cards(self, last: TimedReading) -> None:
        rows = [
            (json.dumps({name: getattr(card, name) for name in CardReading.__slots__}), last.time, card.uuid)
            for card in last.cards
        ]
        self._file.connection.executemany("UPDATE cards SET reading = ?, time = ? WHERE uuid = ?", rows)

    def _look_after(self) -> None:
        """What is due once a minute."""
        self.names.forget_unused()
        self._reserve.fill()
        if not self._file.is_same_file():
            self._move()

    def _failed(self, error: sqlite3.Error) -> None:
        # Errors that Python's own layer raises, as for a connection that is closed, have no code.
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & PRIMARY
        if code not in (*_NO_SPACE, *NO_DATABASE, *_OF_THE_MACHINE):
            raise error
        self.trouble = f"the history is not written: {error}; {len(self._waiting)} readings wait"
        with contextlib.suppress(sqlite3.Error):
            if self._file.connection.in_transaction:
                self._file.connection.execute("ROLLBACK")
            if code in _NO_SPACE:
                self.trouble = f"no space for the history ({error}): the older half of it is dropped"
                self._reserve.give_up()
                self._file.make_room()
        if code in NO_DATABASE:
            self._move(is_damaged=is_damage(error))

    def _move(self, *, is_damaged: bool = False) -> None:
        """Goes on with a new file; tried again at the next reading if that cannot be."""
        if self._file.begin_anew(is_damaged=is_damaged):
            with contextlib.suppress(sqlite3.Error):
                self.names.move_to(self._file.connection)
