"""The agent: a reading at most every second, written with its forecasts; never in a hurry to make up for readings that it missed."""

import dataclasses
import socket
import sqlite3
import threading
from pathlib import Path
from typing import Any

from tightfit.watch.agent.process_table import ProcessTable
from tightfit.watch.agent.source_reader import SourceReader
from tightfit.watch.agent.timeline import Timeline
from tightfit.watch.clock import AbstractClock
from tightfit.watch.machine_state import CardState, MachineState, ProcessState
from tightfit.watch.outlook.planner import OutlookPlanner, OutlookSettings
from tightfit.watch.printable import printable
from tightfit.watch.readings import CardReading, ProcessFacts, ProcessReading, Reading
from tightfit.watch.sources.abstract_source import AbstractSource
from tightfit.watch.store.history_writer import HistoryWriter, Moment
from tightfit.watch.store.levels import Retention
from tightfit.watch.store.schema import SEEN, USED

MIN_INTERVAL_SECONDS = 1.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """How an agent works: seconds between readings, what the history keeps and how large it may grow, and what is forecast."""

    interval_seconds: float = MIN_INTERVAL_SECONDS
    retention: Retention = Retention()
    max_bytes: int = 1 << 30
    outlooks: OutlookSettings = OutlookSettings()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """One reading with the names of what is in it: the series of each card, and of each process that has one."""

    wall: float
    reading: Reading
    card_series: dict[str, int]
    processes: list[tuple[ProcessReading, ProcessFacts, int | None]]


class Agent:
    """Reads one source into one history. `tick` is called by one thread; `state` by any."""

    def __init__(self, source: AbstractSource, database: Path, clock: AbstractClock, settings: AgentSettings) -> None:
        """Opens the history.

        Raises:
            WatchError: it belongs to another version, or another program.
        """
        self._clock, self._settings = clock, settings
        self._reader = SourceReader(source)
        self._processes = ProcessTable(source)
        self._writer = HistoryWriter(database, max_bytes=settings.max_bytes, retention=settings.retention)
        self._timeline = Timeline(self._writer.last_time)
        self._planner = OutlookPlanner(database, settings.outlooks)
        self._host = printable(socket.gethostname())
        self._seen: _Seen | None = None

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
            time = self._timeline.advance(wall, monotonic)
            seen, samples = self._name(reading, time, wall, monotonic)
            moment = Moment(time=time, wall=round(wall * 1000), cards=reading.cards, samples=samples)
            self._writer.keep_outlooks(self._planner.plan(self._needed(seen), wall, monotonic))
            self._seen = seen
        self._writer.add(moment, self._status())
        self._processes.sweep(monotonic)

    def state(self) -> MachineState | None:
        """The machine as it was last seen; None before the first reading."""
        seen = self._seen
        if seen is None:
            return None
        said = self._status()
        outlooks = self._planner.outlooks
        return MachineState(
            host=self._host,
            time=seen.wall,
            source=said["source"],
            interval_seconds=said["interval_seconds"],
            lost_since=said["lost_since"],
            lost_reason=said["lost_reason"],
            cards=tuple(
                CardState(reading=card, outlook=outlooks.get(seen.card_series.get(card.uuid, -1)))
                for card in seen.reading.cards
            ),
            processes=tuple(
                ProcessState(
                    facts=facts,
                    card=process.card,
                    used_bytes=process.used_bytes,
                    allocated_bytes=None,
                    reserved_bytes=None,
                    outlook=outlooks.get(series) if series is not None else None,
                )
                for process, facts, series in seen.processes
            ),
            episodes=(),
            notes=tuple(said["notes"]),
        )

    def close(self) -> None:
        """Closes the history and the source."""
        self._planner.close()
        self._writer.close()
        self._reader.source.close()

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
        processes = []
        for process in reading.processes:
            facts = self._processes.facts(process.pid, monotonic)
            kind = USED if process.used_bytes is not None else SEEN
            series = self._series(kind, cards[process.card], facts, time)
            if series is not None:
                samples.append((series, process.used_bytes or 0))
            processes.append((process, facts, series))
        return _Seen(wall=wall, reading=reading, card_series=card_series, processes=processes), samples

    def _series(self, kind: str, card: CardReading, process: ProcessFacts | None, time: int) -> int | None:
        try:
            return self._writer.names.series(kind, card, process, time)
        except sqlite3.Error:
            return None

    def _needed(self, seen: _Seen) -> dict[int, tuple[int, bool]]:
        """What is to be forecast: bytes now, and whether it is a card's, by series."""
        found = {
            seen.card_series[card.uuid]: (card.used_bytes, True)
            for card in seen.reading.cards
            if card.uuid in seen.card_series and card.used_bytes is not None
        }
        for process, _, series in seen.processes:
            if series is not None and process.used_bytes is not None:
                found[series] = process.used_bytes, False
        return found

    def _status(self) -> dict[str, Any]:
        """What readers are told of the agent."""
        return {
            "host": self._host,
            "source": self._reader.source.name,
            "interval_seconds": self._settings.interval_seconds,
            "lost_since": self._reader.lost_since,
            "lost_reason": self._reader.lost_reason,
            "notes": [note for note in (self._writer.trouble, self._timeline.note) if note],
        }
