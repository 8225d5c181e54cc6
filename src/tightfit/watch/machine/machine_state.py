"""What is known of a machine at one moment: what every output shows. The agent has it in memory; another process reads it from the store."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from tightfit.watch.machine.readings import CardReading, ProcessFacts


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """The peak of the next `horizon_seconds`, forecast at `made_at` (Unix seconds): within the median with a probability of one half, within the upper bound with `quantile`.

    `growth_bytes_per_hour` is how fast a series grows that does so steadily, else 0.
    """

    made_at: float
    horizon_seconds: float
    quantile: float
    median_bytes: int
    upper_bytes: int
    growth_bytes_per_hour: int
    model: str
    note: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CardState:
    """A card now, and what it will need."""

    reading: CardReading
    outlook: Outlook | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState:
    """A process on one card (`card` is its UUID). `allocated_bytes` and `reserved_bytes` are those of torch's allocator, if the process publishes them."""

    facts: ProcessFacts
    card: str
    used_bytes: int | None
    allocated_bytes: int | None
    reserved_bytes: int | None
    outlook: Outlook | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """An alert: the time in which a rule held for a subject, in Unix seconds; not resolved while it still does."""

    rule: str
    subject: str
    message: str
    fired_at: float
    resolved_at: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MachineState:
    """The whole machine. `time` is that of the last reading, in Unix seconds; `lost_since` says since when the driver has not answered, and `lost_reason` why.

    `notes` are what the agent has to say of itself: a full disk, a clock that was set.
    """

    host: str
    time: float
    source: str
    interval_seconds: float
    lost_since: float | None
    lost_reason: str
    cards: tuple[CardState, ...]
    processes: tuple[ProcessState, ...]
    episodes: tuple[Episode, ...]
    notes: tuple[str, ...]

    def processes_of(self, card: str) -> tuple[ProcessState, ...]:
        """Those of one card, the largest first."""
        found = (each for each in self.processes if each.card == card)
        return tuple(sorted(found, key=lambda each: -(each.used_bytes or 0)))

    def containers(self) -> dict[str, int]:
        """Bytes of each container on all cards, the largest first; processes outside of one count as the empty name."""
        found: dict[str, int] = {}
        for each in self.processes:
            found[each.facts.container] = found.get(each.facts.container, 0) + (each.used_bytes or 0)
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types: sizes in bytes, times in Unix seconds."""
        indices = {each.reading.uuid: each.reading.index for each in self.cards}
        return {
            "schema": 1,
            "host": self.host,
            "time": self.time,
            "source": {"name": self.source, "lost_since": self.lost_since, "lost_reason": self.lost_reason},
            "interval_seconds": self.interval_seconds,
            "cards": [{**dataclasses.asdict(each.reading), "forecast": _as_json(each.outlook)} for each in self.cards],
            "processes": [
                {
                    "gpu": indices.get(each.card),
                    "card": each.card,
                    "pid": each.facts.pid,
                    "started": each.facts.started,
                    "user": each.facts.user,
                    "command": each.facts.command,
                    "container": each.facts.container,
                    "used_bytes": each.used_bytes,
                    "allocated_bytes": each.allocated_bytes,
                    "reserved_bytes": each.reserved_bytes,
                    "forecast": _as_json(each.outlook),
                }
                for each in self.processes
            ],
            "containers": [{"name": name, "used_bytes": size} for name, size in self.containers().items() if name],
            "alerts": [dataclasses.asdict(each) for each in self.episodes],
            "notes": list(self.notes),
        }


def firing(episodes: Sequence[Episode]) -> tuple[Episode, ...]:
    """Those that are not resolved."""
    return tuple(each for each in episodes if each.resolved_at is None)


def _as_json(outlook: Outlook | None) -> dict[str, Any] | None:
    return None if outlook is None else dataclasses.asdict(outlook)
