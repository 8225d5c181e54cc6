"""The agent: a reading at most every second, written with its forecasts, looked at for alerts; never in a hurry to make up for readings that it missed."""

import dataclasses
import socket
import sqlite3
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tightfit.watch.agent.alerting import Alerting
from tightfit.watch.agent.process_table import ProcessTable
from tightfit.watch.agent.reading_clock import ReadingClock
from tightfit.watch.agent.source_reader import SourceReader
from tightfit.watch.alerts.alert_rules import DEFAULT, AlertSettings
from tightfit.watch.background import Background
from tightfit.watch.clock import AbstractClock
from tightfit.watch.machine.machine_state import CardState, MachineState, ProcessState
from tightfit.watch.machine.printable import printable
from tightfit.watch.machine.readings import CardReading, ProcessFacts, ProcessReading, Reading
from tightfit.watch.outlook.planner import OutlookPlanner, OutlookSettings
from tightfit.watch.publishing.listener import Listener, TorchCounters, without_prefix
from tightfit.watch.sources.abstract_source import AbstractSource
from tightfit.watch.store.history_writer import HistoryWriter, TimedReading
from tightfit.watch.store.levels import Retention
from tightfit.watch.store.schema import ALLOCATED, RESERVED, SEEN, USED

MIN_INTERVAL_SECONDS = 1.0
_SINK_SECONDS = 10.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """How an agent works: seconds between readings, what the history keeps and how large it may grow, what is forecast and alerted about, and where programs publish."""

    interval_seconds: float = MIN_INTERVAL_SECONDS
    retention: Retention = Retention()
    max_bytes: int = 1 << 30
    outlooks: OutlookSettings = OutlookSettings()
    alerts: AlertSettings = DEFAULT
    listen_at: Path | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Process:
    """A process in a reading: who it is, the series of its memory if it has one, and what it has published of this card."""

    reading: ProcessReading
    facts: ProcessFacts
    series: int | None
    torch: TorchCounters | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """One reading with the names of what is in it."""

    wall: float
    reading: Reading
    card_series: dict[str, int]
    processes: list[_Process]


class Agent:
    """Reads one source into one history. `tick` is called by one thread; `state` by any."""

    def __init__(
        self,
        source: AbstractSource,
        database: Path,
        clock: AbstractClock,
        settings: AgentSettings,
        sinks: Sequence[Background[MachineState]] = (),
    ) -> None:
        """Opens the history. `sinks` get a state every ten seconds.

        Raises:
            WatchError: the history belongs to another version, or another program.
        """
        self._clock, self._settings, self._sinks = clock, settings, sinks
        self._reader = SourceReader(source)
        self._processes = ProcessTable(source)
        self._writer = HistoryWriter(database, max_bytes=settings.max_bytes, retention=settings.retention)
        self._reading_clock = ReadingClock(self._writer.last_time)
        self._planner = OutlookPlanner(database, settings.outlooks)
        self._alerting = Alerting(settings.alerts, database, settings.outlooks)
        self._listener = None if settings.listen_at is None else Listener(settings.listen_at)
        self._host = printable(socket.gethostname())
        self._seen: _Seen | None = None
        self._next_sink = 0.0

    def run(self, stop: threading.Event) -> None:
        """Reads until `stop` is set. A reading that takes longer than the interval is followed by the next one at its turn, not at once."""
        due = self._clock.monotonic()
        while not stop.is_set():
            self.tick()
            due = max(due + self._settings.interval_seconds, self._clock.monotonic())
            if self._clock.wait(due - self._clock.monotonic(), stop):
                break

    def tick(self) -> None:
        """One reading, and all that follows from it."""
        wall, monotonic = self._clock.wall(), self._clock.monotonic()
        reading = self._reader.read(wall, monotonic)
        moment = None
        if reading is not None:
            time = self._reading_clock.advance(wall, monotonic)
            seen, samples = self._name(reading, time, wall, monotonic)
            moment = TimedReading(time=time, wall=round(wall * 1000), cards=reading.cards, samples=samples)
            self._writer.keep_outlooks(self._planner.plan(_needed(seen), wall, monotonic))
            self._seen = seen
        if self._seen is not None:
            state = self._state(self._seen, with_processes=self._alerting.needs_processes)
            notices = self._alerting.look(state, self._seen.card_series, wall, monotonic)
            self._writer.keep_episodes(notice.episode for notice in notices)
            if self._sinks and monotonic >= self._next_sink:
                self._next_sink = monotonic + _SINK_SECONDS
                for sink in self._sinks:
                    sink.put(self._state(self._seen))
        self._writer.add(moment, self._status())
        self._processes.sweep(monotonic)

    def state(self) -> MachineState | None:
        """The machine as it was last seen; None before the first reading."""
        seen = self._seen
        return None if seen is None else self._state(seen)

    def _state(self, seen: _Seen, *, with_processes: bool = True) -> MachineState:
        outlooks = self._planner.outlooks
        return MachineState(
            host=self._host,
            time=seen.wall,
            source=self._reader.source.name,
            interval_seconds=self._settings.interval_seconds,
            lost_since=self._reader.lost_since,
            lost_reason=self._reader.lost_reason,
            cards=tuple(
                CardState(reading=card, outlook=outlooks.get(seen.card_series.get(card.uuid, -1)))
                for card in seen.reading.cards
            ),
            processes=tuple(
                ProcessState(
                    facts=each.facts,
                    card=each.reading.card,
                    used_bytes=each.reading.used_bytes,
                    allocated_bytes=None if each.torch is None else each.torch.allocated_bytes,
                    reserved_bytes=None if each.torch is None else each.torch.reserved_bytes,
                    outlook=outlooks.get(each.series) if each.series is not None else None,
                )
                for each in (seen.processes if with_processes else ())
            ),
            episodes=self._alerting.episodes,
            notes=tuple(self._notes()),
        )

    def close(self) -> None:
        """Closes the history and the source, and ends what runs beside."""
        self._alerting.close()
        self._writer.close()
        self._reader.source.close()
        if self._listener is not None:
            self._listener.close()

    def _name(self, reading: Reading, time: int, wall: float, monotonic: float) -> tuple[_Seen, list[tuple[int, int]]]:
        """The reading with the numbers of its series, and its samples. What the store cannot name now is not kept."""
        samples: list[tuple[int, int]] = []
        cards = {card.uuid: card for card in reading.cards}
        card_series: dict[str, int] = {}
        for card in reading.cards:
            series = self._series(USED, card, None, time)
            if series is not None and card.used_bytes is not None:
                card_series[card.uuid] = series
                samples.append((series, card.used_bytes))
        listener = self._listener if self._listener is not None and self._listener.is_heard else None
        num_cards = Counter(each.pid for each in reading.processes) if listener is not None else {}
        processes = []
        for process in reading.processes:
            card, facts = cards[process.card], self._processes.facts(process.pid, monotonic)
            series = self._series(USED if process.used_bytes is not None else SEEN, card, facts, time)
            if series is not None:
                samples.append((series, process.used_bytes or 0))
            torch = None
            if listener is not None:
                is_only = num_cards[process.pid] == 1
                torch = _on_card(listener.counters(process.pid), process.card, is_only=is_only)
            if torch is not None:
                for kind, size in ((ALLOCATED, torch.allocated_bytes), (RESERVED, torch.reserved_bytes)):
                    number = self._series(kind, card, facts, time)
                    if number is not None:
                        samples.append((number, size))
            processes.append(_Process(reading=process, facts=facts, series=series, torch=torch))
        return _Seen(wall=wall, reading=reading, card_series=card_series, processes=processes), samples

    def _series(self, kind: str, card: CardReading, process: ProcessFacts | None, time: int) -> int | None:
        try:
            return self._writer.names.series(kind, card, process, time)
        except sqlite3.Error:
            return None

    def _notes(self) -> list[str]:
        """What the agent has to say of itself."""
        heard = "" if self._listener is None else self._listener.trouble
        found = [self._writer.trouble, self._reading_clock.note, heard, *self._alerting.troubles]
        return [printable(note) for note in (*found, *(sink.trouble for sink in self._sinks)) if note]

    def _status(self) -> dict[str, Any]:
        """What readers are told of the agent."""
        return {
            "host": self._host,
            "source": self._reader.source.name,
            "interval_seconds": self._settings.interval_seconds,
            "lost_since": self._reader.lost_since,
            "lost_reason": self._reader.lost_reason,
            "notes": self._notes(),
        }


def _needed(seen: _Seen) -> dict[int, tuple[int, bool]]:
    """What is to be forecast: bytes now, and whether it is a card's, by series."""
    found = {
        seen.card_series[card.uuid]: (card.used_bytes, True)
        for card in seen.reading.cards
        if card.uuid in seen.card_series and card.used_bytes is not None
    }
    for each in seen.processes:
        if each.series is not None and each.reading.used_bytes is not None:
            found[each.series] = each.reading.used_bytes, False
    return found


def _on_card(published: tuple[TorchCounters, ...], card: str, *, is_only: bool) -> TorchCounters | None:
    """What a process has published of one card; of a slice of a card (MIG), which torch calls by a name of its own, if it is the only one that the process uses."""
    name = without_prefix(card)
    found = next((each for each in published if each.uuid == name), None)
    return published[0] if found is None and is_only and len(published) == 1 else found
