"""Which series is forecast when: all of them in turn, as many as a small share of a processor allows, cards and what has changed first."""

import contextlib
import dataclasses
import math
import sqlite3
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from tightfit.errors import WatchError
from tightfit.forecast.forecasts import forecast_series
from tightfit.forecast.series import Series
from tightfit.units import format_bytes
from tightfit.watch.machine.machine_state import Outlook
from tightfit.watch.outlook.steady_growth import steady_growth
from tightfit.watch.store.stored_history import StoredHistory

_SAMPLE_SECONDS = 60.0
_MIN_SAMPLES = 3
"""With fewer minutes there is nothing to say."""
_MAX_SAVED_SECONDS = 60.0
_CHANGED_SECONDS, _UNCHANGED_SECONDS = 60.0, 600.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OutlookSettings:
    """How far and how sure, and at what cost: `share` of one processor. Cards are forecast from `card_minutes` of history, processes from fewer."""

    horizon_seconds: float = 3600.0
    quantile: float = 0.975
    share: float = 0.002
    card_minutes: int = 1440
    process_minutes: int = 720


@dataclasses.dataclass(slots=True)
class _Made:
    outlook: Outlook | None
    used: int
    at: float


class OutlookPlanner:
    """The latest forecasts, by series."""

    def __init__(self, database: Path, settings: OutlookSettings) -> None:
        self._database, self._settings = database, settings
        self._made: dict[int, _Made] = {}
        self._credit = _MAX_SAVED_SECONDS * settings.share
        self._last: float | None = None
        self.outlooks: Mapping[int, Outlook] = {}
        """Replaced as a whole, so that other threads may read it. Those of an agent before this one count until they are made anew."""
        with _reading(database) as history:
            before = {} if history is None else history.outlooks()
            horizon = (settings.horizon_seconds, settings.quantile)
            self.outlooks = {s: each for s, each in before.items() if (each.horizon_seconds, each.quantile) == horizon}
            self._made = {series: _Made(each, -1, -math.inf) for series, each in self.outlooks.items()}

    def plan(self, needed: Mapping[int, tuple[int, bool]], wall: float, monotonic: float) -> dict[int, Outlook]:
        """Makes the forecasts that are due and paid for. `needed` has the bytes of each series now, and whether it is a card's."""
        elapsed = monotonic - (monotonic if self._last is None else self._last)
        self._last = monotonic
        self._credit = min(self._credit + elapsed * self._settings.share, _MAX_SAVED_SECONDS * self._settings.share)
        made: dict[int, Outlook] = {}
        if self._credit <= 0.0:
            return made
        due = self._due(needed, monotonic)
        if not due:
            return made
        # Opened anew each time: the file may have been deleted, and another one be there.
        with _reading(self._database) as history:
            for series in due:
                if self._credit <= 0.0:
                    break
                before = time.thread_time()
                used, is_card = needed[series]
                outlook = None if history is None else self._forecast(history, series, wall, used, is_card=is_card)
                self._made[series] = _Made(outlook, used, monotonic)
                if outlook is not None:
                    made[series] = outlook
                self._credit -= time.thread_time() - before
        if made or len(self._made) > len(needed):
            self._made = {series: each for series, each in self._made.items() if series in needed}
            self.outlooks = {s: each.outlook for s, each in self._made.items() if each.outlook is not None}
        return made

    def _due(self, needed: Mapping[int, tuple[int, bool]], monotonic: float) -> list[int]:
        """What is due, the most urgent first: what is above its bound, cards, what has changed, the rest."""
        rows = []
        for series, (used, is_card) in needed.items():
            made = self._made.get(series)
            if made is None:
                rows.append((1 if is_card else 2, 0.0, series))
                continue
            age = monotonic - made.at
            if age < _CHANGED_SECONDS:
                continue
            if made.outlook is not None and used > made.outlook.upper_bytes:
                rows.append((0, -age, series))
            elif is_card:
                rows.append((1, -age, series))
            elif used != made.used or age >= _UNCHANGED_SECONDS:
                rows.append((2, -age, series))
        return [series for _, _, series in sorted(rows)]

    def _forecast(
        self, history: StoredHistory, series: int, wall: float, used: int, *, is_card: bool
    ) -> Outlook | None:
        settings = self._settings
        # The store may be locked, full or not written yet: then there is no forecast, and the next minute has one.
        with contextlib.suppress(sqlite3.Error, LookupError):
            count = settings.card_minutes if is_card else settings.process_minutes
            past = history.minutes_of(series, count=count)
            if len(past.values) < _MIN_SAMPLES:
                return None
            samples = num_samples(past, settings.horizon_seconds)
            found = forecast_series(past, horizon=samples, quantile=settings.quantile)
            slope = steady_growth(past)
            grown, hourly = round(slope * settings.horizon_seconds), round(slope * 3600)
            is_growing = grown > 0 and used + grown > found.upper_bytes
            return Outlook(
                made_at=wall,
                horizon_seconds=settings.horizon_seconds,
                quantile=settings.quantile,
                # What is used now is used in the next hour too, if only for a moment.
                median_bytes=max(found.median_bytes, used),
                upper_bytes=max(found.upper_bytes, used + grown),
                growth_bytes_per_hour=hourly,
                model="growth" if is_growing else found.model,
                note=f"grows by {format_bytes(hourly)} an hour" if hourly else found.note,
            )
        return None


def num_samples(past: Series, seconds: float) -> int:
    """The samples of a series in the next `seconds`: its samples are minutes, or further apart where the agent reads less often."""
    return max(1, math.ceil(seconds / (past.interval or _SAMPLE_SECONDS) - 1e-6))


@contextlib.contextmanager
def _reading(database: Path) -> Iterator[StoredHistory | None]:
    """The history, None where it cannot be read now."""
    try:
        history = StoredHistory(database)
    except WatchError:
        yield None
        return
    try:
        yield history
    finally:
        history.close()
