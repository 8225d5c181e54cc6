"""What is kept of a history, and for how long: readings become minutes, minutes hours, each with the largest sample; the oldest rows of a level go."""

import dataclasses
import itertools
import sqlite3

from tightfit.watch.store.schema import LEVELS, SPANS

_MIN_KEPT = 60
"""Rows of a level that stay when history is dropped for want of space."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """How many moments each level keeps: of readings every second, an hour; minutes for a week; hours for a year.

    Counted and not by age: a clock that is set to next year by mistake must not cost the history of this one.
    """

    readings: int = 3600
    minutes: int = 7 * 24 * 60
    hours: int = 366 * 24


def roll_up(connection: sqlite3.Connection, time: int) -> None:
    """Writes the minutes and hours that are over at `time` and not written yet."""
    for below, level in itertools.pairwise(LEVELS):
        span = SPANS[level]
        end = time // span * span
        (last,) = connection.execute("SELECT max(time) FROM moments WHERE level = ?", (level,)).fetchone()
        begin = 0 if last is None else last + span
        connection.execute(
            f"INSERT INTO {level} SELECT time / {span} * {span}, series, max(bytes) FROM {below} "
            f"WHERE time >= ? AND time < ? GROUP BY time / {span}, series",
            (begin, end),
        )
        connection.execute(
            f"INSERT INTO moments SELECT ?, time / {span} * {span}, max(wall) FROM moments "
            f"WHERE level = ? AND time >= ? AND time < ? GROUP BY time / {span}",
            (level, below, begin, end),
        )


def drop_old(connection: sqlite3.Connection, retention: Retention) -> None:
    """Deletes the oldest rows of each level, as far as it has more than it keeps."""
    for level in LEVELS:
        _keep(connection, level, getattr(retention, level))


def drop_half(connection: sqlite3.Connection) -> bool:
    """Deletes the older half of each level, in a transaction each; False if there was nothing that could go."""
    is_less = False
    for level in LEVELS:
        (count,) = connection.execute("SELECT count(*) FROM moments WHERE level = ?", (level,)).fetchone()
        if count > _MIN_KEPT:
            connection.execute("BEGIN IMMEDIATE")
            _keep(connection, level, max(_MIN_KEPT, count // 2))
            connection.execute("COMMIT")
            is_less = True
    return is_less


def drop_ended(connection: sqlite3.Connection, time: int) -> None:
    """Deletes series and processes that have no sample left; called when an hour is over, at `time`."""
    hour = SPANS["hours"]
    last = time // hour * hour - hour
    connection.execute(
        "UPDATE series SET last = ? WHERE id IN (SELECT series FROM hours WHERE time = ? "
        "UNION SELECT series FROM readings WHERE time = (SELECT max(time) FROM readings))",
        (time, last),
    )
    (oldest,) = connection.execute("SELECT min(time) FROM moments").fetchone()
    connection.execute("DELETE FROM series WHERE process > 0 AND last < ?", (oldest or 0,))
    connection.execute("DELETE FROM outlooks WHERE series NOT IN (SELECT id FROM series)")
    connection.execute("DELETE FROM processes WHERE id NOT IN (SELECT process FROM series)")


def _keep(connection: sqlite3.Connection, level: str, count: int) -> None:
    found = connection.execute(
        "SELECT time FROM moments WHERE level = ? ORDER BY time DESC LIMIT 1 OFFSET ?", (level, count)
    ).fetchone()
    if found is not None:
        connection.execute(f"DELETE FROM {level} WHERE time <= ?", found)
        connection.execute("DELETE FROM moments WHERE level = ? AND time <= ?", (level, *found))
