"""Reads memory over time from a store: of one series for forecasts, of a card and its processes for charts."""

import dataclasses
import math
import sqlite3
from collections.abc import Collection
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tightfit.forecast.series import Floats, Series
from tightfit.watch.machine.machine_state import Episode, Outlook
from tightfit.watch.store.schema import LEVELS, SPANS, USED, open_to_read

_FINEST = {"readings": 900.0, "minutes": 48 * 3600.0, "hours": math.inf}
"""Up to which span, in seconds, a chart is drawn from the samples of a level."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layer:
    """Memory of one process over a chart's bins, (bins,), NaN where it was not seen."""

    pid: int
    user: str
    command: str
    container: str
    values: Floats


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CardHistory:
    """Memory of a card: for each bin its end, in Unix seconds, and the largest sample of it; (bins,) each, NaN where there was none.

    `layers` are the processes with the most memory over time, the largest first; `others` are the rest of the processes together.
    """

    times: Floats
    used: Floats
    layers: tuple[Layer, ...]
    others: Floats


class StoredHistory:
    """What a store holds, for one thread."""

    def __init__(self, path: Path) -> None:
        """Opens the store.

        Raises:
            WatchError: there is none, or it cannot be read.
        """
        self._connection = open_to_read(path)

    def close(self) -> None:
        """Closes the file."""
        self._connection.close()

    def outlooks(self) -> dict[int, Outlook]:
        """The latest forecast of each series that has one.

        Raises:
            sqlite3.Error: the store cannot be read now.
        """
        return outlooks_of(self._connection)

    def open_episodes(self) -> list[Episode]:
        """Alerts that have not ended.

        Raises:
            sqlite3.Error: the store cannot be read now.
        """
        rows = self._connection.execute(
            f"SELECT {', '.join(Episode.__slots__)} FROM episodes WHERE resolved_at IS NULL"
        )
        return [Episode(**dict(zip(Episode.__slots__, row, strict=True))) for row in rows]

    def series_of_cards(self) -> dict[str, int]:
        """The series of the memory of each card, by its UUID.

        Raises:
            sqlite3.Error: the store cannot be read now.
        """
        return series_of_cards(self._connection)

    def minutes_of(self, series: int, *, count: int) -> Series:
        """The largest sample of each of the last `count` minutes of a series that has any, the minute that is not over included.

        Raises:
            LookupError: it has none.
            sqlite3.Error: the store cannot be read now.
        """
        span = SPANS["minutes"]
        last = self._last()
        begin = (last[0] // span - count + 1) * span
        # One lookup a minute: the rows of a minute are beside each other, those of a series are not.
        rows = self._connection.execute(
            "SELECT m.time, v.bytes FROM moments m CROSS JOIN minutes v ON v.time = m.time AND v.series = ? "
            "WHERE m.level = 'minutes' AND m.time >= ?",
            (series, begin),
        ).fetchall()
        rolled = rows[-1][0] + span if rows else last[0] // span * span
        tail = self._connection.execute(
            "SELECT max(v.bytes) FROM moments m CROSS JOIN readings v ON v.time = m.time AND v.series = ? "
            "WHERE m.level = 'readings' AND m.time >= ?",
            (series, max(rolled, last[0] // span * span)),
        ).fetchone()[0]
        if tail is not None:
            rows.append((last[0] // span * span, tail))
        if not rows:
            raise LookupError(f"series {series} has no samples")
        table = np.array(rows, dtype=np.float64)
        return Series(name=str(series), times=table[:, 0] / 1000.0, values=table[:, 1])

    def of_card(self, uuid: str, *, seconds: float, bins: int, num_layers: int) -> CardHistory:
        """The last `seconds` of a card, in at most so many bins, from samples that are as fine as the span allows.

        Raises:
            LookupError: there is no such card.
            sqlite3.Error: the store cannot be read now.
        """
        found = self._connection.execute("SELECT id FROM cards WHERE uuid = ?", (uuid,)).fetchone()
        if found is None:
            raise LookupError(f"there is no card {uuid}")
        time, wall = self._last()
        begin = time - round(seconds * 1000)
        names = {
            row[0]: row[1:]
            for row in self._connection.execute(
                "SELECT s.id, p.pid, p.user, p.command, p.container FROM series s LEFT JOIN processes p ON p.id = s.process "
                "WHERE s.card = ? AND s.kind = ? AND s.last >= ?",
                (*found, USED, begin - SPANS["hours"]),
            )
        }
        rows = self._samples(names, begin, _level(seconds))
        bins = _num_bins(rows[:, 0], time - begin, bins)
        width = (time - begin) / bins
        binned = _binned(rows, begin, width, bins)
        edges = (begin + width * np.arange(1, bins + 1, dtype=np.float64) + wall - time) / 1000.0
        nothing = np.full(bins, np.nan)
        used = next((binned.pop(s) for s in list(binned) if names[s][0] is None), nothing)
        ordered = sorted(binned, key=lambda series: -float(np.nansum(binned[series])))
        layers = tuple(
            Layer(**dict(zip(("pid", "user", "command", "container"), names[s], strict=True)), values=binned[s])
            for s in ordered[:num_layers]
        )
        rest = np.array([nothing, *(binned[s] for s in ordered[num_layers:])])
        others = np.where(np.isnan(rest).all(axis=0), np.nan, np.nansum(rest, axis=0))
        return CardHistory(times=edges, used=used, layers=layers, others=others)

    def _last(self) -> tuple[int, int]:
        """The time of the last reading, and what the wall clock said then."""
        row = self._connection.execute(
            "SELECT time, wall FROM moments WHERE level = 'readings' ORDER BY time DESC LIMIT 1"
        ).fetchone()
        if row is None:
            raise LookupError("the history has no reading yet")
        return row

    def _samples(self, series: Collection[int], begin: int, level: str) -> NDArray[np.int64]:
        """Rows (time, series, bytes) of some series since `begin` of a level, and of the finer ones since it ends."""
        numbers = ",".join(map(str, series))
        parts = []
        for name in LEVELS[LEVELS.index(level) :: -1]:
            rows = self._connection.execute(
                f"SELECT time, series, bytes FROM {name} WHERE time >= ? AND series IN ({numbers})", (begin,)
            ).fetchall()
            parts.append(np.array(rows, dtype=np.int64).reshape(-1, 3))
            if rows and name in SPANS:
                begin = max(begin, rows[-1][0] + SPANS[name])
        return np.concatenate(parts)


def outlooks_of(connection: sqlite3.Connection) -> dict[int, Outlook]:
    """The latest forecasts in a store, by series."""
    rows = connection.execute(f"SELECT series, {', '.join(Outlook.__slots__)} FROM outlooks")
    return {row[0]: Outlook(**dict(zip(Outlook.__slots__, row[1:], strict=True))) for row in rows}


def series_of_cards(connection: sqlite3.Connection) -> dict[str, int]:
    """The series of the memory of each card, by its UUID."""
    rows = connection.execute(
        "SELECT c.uuid, s.id FROM series s JOIN cards c ON c.id = s.card WHERE s.process = 0 AND s.kind = ?", (USED,)
    )
    return dict(rows.fetchall())


def _level(seconds: float) -> str:
    return next(level for level in LEVELS if seconds <= _FINEST[level])


def _num_bins(times: NDArray[np.int64], span: int, bins: int) -> int:
    """No more bins than there are samples in the span at their usual interval."""
    moments = np.unique(times)
    step = float(np.median(np.diff(moments))) if len(moments) > 1 else span
    return max(1, min(bins, int(span / step)))


def _binned(rows: NDArray[np.int64], begin: int, width: float, bins: int) -> dict[int, Floats]:
    """The largest sample of each series in each bin; a single bin without one has that of the bin before, as samples do not come on the beat."""
    cells = np.clip(((rows[:, 0] - begin) / width).astype(np.int64), 0, bins - 1)
    series, index = np.unique(rows[:, 1], return_inverse=True)
    table = np.full((len(series), bins), -1.0)
    np.maximum.at(table, (index, cells), rows[:, 2].astype(np.float64))
    is_hole = (table[:, 1:-1] < 0) & (table[:, :-2] >= 0) & (table[:, 2:] >= 0)
    table[:, 1:-1] = np.where(is_hole, table[:, :-2], table[:, 1:-1])
    table[table < 0] = np.nan
    return dict(zip(series.tolist(), table, strict=True))
