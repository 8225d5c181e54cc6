"""What a source answers at one moment: the cards, and which process uses how much memory of which card."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CardReading:
    """One card. What the driver does not say is None; `utilization` is the share of the last interval in which a kernel ran, 0 to 1."""

    uuid: str
    index: int
    name: str
    vendor: str
    driver: str
    total_bytes: int | None
    used_bytes: int | None
    utilization: float | None
    power_watts: float | None
    temperature_celsius: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProcessReading:
    """Memory that one process uses on the card `card` (its UUID); None where the driver does not say how much."""

    card: str
    pid: int
    used_bytes: int | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFacts:
    """What stays the same while a process lives.

    `identity` differs between two processes that had the same PID one after the other. `started` is in Unix seconds, None if unknown; `container` is empty outside of one.
    All texts can be printed as they are: control characters are written out.
    """

    pid: int
    identity: str
    started: float | None
    user: str
    command: str
    container: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """All cards in the order of their indices, and their processes; each pair of card and process once."""

    cards: tuple[CardReading, ...]
    processes: tuple[ProcessReading, ...]
