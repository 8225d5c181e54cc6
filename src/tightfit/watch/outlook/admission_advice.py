"""Whether one more job fits on a card, now and for the next hour."""

import contextlib
import dataclasses
import sqlite3
import time
from pathlib import Path
from typing import Any

from tightfit.errors import WatchError
from tightfit.forecast.admission import Admission, admit
from tightfit.forecast.horizon import Horizon
from tightfit.units import format_bytes
from tightfit.watch.machine.machine_state import MachineState
from tightfit.watch.machine.readings import CardReading
from tightfit.watch.outlook.planner import OutlookSettings, num_samples
from tightfit.watch.store.stored_history import StoredHistory

_KEPT_SECONDS = 60.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What is said of one card; `admission` is None where its memory is not known."""

    index: int
    uuid: str
    admission: Admission | None
    sentence: str

    @property
    def fits(self) -> bool:
        """Whether the job fits now and stays within the bound over the horizon."""
        return self.admission is not None and self.admission.fits

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types, as `tightfit forecast --json` has them."""
        found = None if self.admission is None else {**dataclasses.asdict(self.admission), "fits": self.admission.fits}
        return {"gpu": self.index, "card": self.uuid, "admission": found, "sentence": self.sentence}


class JobAdvice:
    """Advice about one job, worked out once a minute: eight forecasts a card, some 50 ms. Without a job there is none."""

    def __init__(self, database: Path, job_bytes: int | None, settings: OutlookSettings) -> None:
        self._database, self._job_bytes, self._settings = database, job_bytes, settings
        self._made: tuple[Advice, ...] = ()
        self._made_at = -_KEPT_SECONDS

    def of(self, state: MachineState) -> tuple[Advice, ...]:
        """For each card, whether the job fits; what was said last while the history cannot be read."""
        if self._job_bytes is not None and time.monotonic() - self._made_at >= _KEPT_SECONDS:
            with contextlib.suppress(sqlite3.Error, WatchError):
                self._made = advise(self._database, state, self._job_bytes, self._settings)
                self._made_at = time.monotonic()
        return self._made

    def sentences(self, state: MachineState) -> list[str]:
        """The same, for people."""
        return [each.sentence for each in self.of(state)]


def advise(database: Path, state: MachineState, job_bytes: int, settings: OutlookSettings) -> tuple[Advice, ...]:
    """For each card, whether a job of `job_bytes` fits.

    Raises:
        WatchError: there is no history, or it cannot be read.
        sqlite3.Error: it cannot be read now.
    """
    history = StoredHistory(database)
    try:
        numbers = history.series_of_cards()
        return tuple(
            _advice(history, numbers.get(card.reading.uuid), card.reading, job_bytes, settings) for card in state.cards
        )
    finally:
        history.close()


def _advice(
    history: StoredHistory, series: int | None, card: CardReading, job_bytes: int, settings: OutlookSettings
) -> Advice:
    past = None
    if series is not None and card.total_bytes:
        with contextlib.suppress(LookupError):
            past = history.minutes_of(series, count=settings.card_minutes)
    if past is None or not card.total_bytes:
        words = f"GPU {card.index}: its memory is not known"
        return Advice(index=card.index, uuid=card.uuid, admission=None, sentence=words)
    horizon = Horizon(count=num_samples(past, settings.horizon_seconds), is_time=False)
    found = admit(
        [past], job_bytes=job_bytes, capacity_bytes=card.total_bytes, horizon=horizon, quantile=settings.quantile
    )
    return Advice(index=card.index, uuid=card.uuid, admission=found, sentence=_sentence(card.index, found, settings))


def _sentence(index: int, found: Admission, settings: OutlookSettings) -> str:
    span = "hour" if settings.horizon_seconds == 3600 else f"{settings.horizon_seconds / 60:.0f} minutes"
    job, free = format_bytes(found.job_bytes), format_bytes(max(0, found.capacity_bytes - found.now_bytes))
    if not found.fits_now:
        return f"GPU {index}: a job of {job} does not fit now ({free} free)"
    bound = f"peak of the others: {100 * settings.quantile:g} % within {format_bytes(found.upper_bytes)}"
    if found.probability is None:
        return f"GPU {index}: a job of {job} fits now, but for the next {span} with less than 50 % ({bound})"
    probability = f"{100 * found.probability:g} %"
    if not found.fits:
        probability += f", below the {100 * settings.quantile:g} % asked for"
        return f"GPU {index}: a job of {job} fits now, but for the next {span} with {probability} ({bound})"
    return f"GPU {index}: a job of {job} fits now and for the next {span} with {probability} ({bound})"
