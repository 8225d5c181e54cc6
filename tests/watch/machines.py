"""Agents over simulated machines and clocks, for the tests of `tightfit watch`."""

import dataclasses
from pathlib import Path

from tightfit.units import GIB
from tightfit.watch.agent.agent import Agent, AgentSettings
from tightfit.watch.clock import SimulatedClock
from tightfit.watch.machine.readings import CardReading, ProcessFacts, ProcessReading, Reading
from tightfit.watch.sources.abstract_source import AbstractSource, SourceLost
from tightfit.watch.sources.simulated import SimulatedMachine, SimulatedSource


class ScriptedSource(AbstractSource):
    """One card of 80 GiB; `used` has the bytes of each process by PID, and is what a test changes."""

    name = "scripted"

    def __init__(self, used: dict[int, int | None]) -> None:
        self.used = used
        self.is_lost = False
        self.commands: dict[int, str] = {}
        self.identities: dict[int, str] = {}

    def read(self, now: float) -> Reading:
        if self.is_lost:
            raise SourceLost("GPU is lost")
        total = sum(size or 0 for size in self.used.values())
        processes = tuple(ProcessReading(card="GPU-0", pid=pid, used_bytes=size) for pid, size in self.used.items())
        return Reading(cards=(card(used_bytes=total),), processes=processes)

    def facts(self, pid: int) -> ProcessFacts:
        command, identity = self.commands.get(pid, "python train.py"), self.identities.get(pid, f"boot:{pid}")
        return ProcessFacts(pid=pid, identity=identity, started=0.0, user="ada", command=command, container="")

    def close(self) -> None:
        pass


def card(*, used_bytes: int, uuid: str = "GPU-0", index: int = 0) -> CardReading:
    return CardReading(
        uuid=uuid,
        index=index,
        name="NVIDIA H100 80GB HBM3",
        vendor="NVIDIA",
        driver="580.1",
        total_bytes=80 * GIB,
        used_bytes=used_bytes,
        utilization=0.5,
        power_watts=310.0,
        temperature_celsius=61.0,
    )


def simulated(cards: int = 2, processes: int = 3, seed: int = 1) -> SimulatedSource:
    return SimulatedSource(SimulatedMachine(num_cards=cards, num_processes=processes, seed=seed))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """An agent with its clock and its history."""

    agent: Agent
    clock: SimulatedClock
    database: Path

    def ticks(self, count: int, *, seconds: float = 1.0) -> None:
        for _ in range(count):
            self.agent.tick()
            self.clock.now += seconds


def bench(folder: Path, source: AbstractSource, settings: AgentSettings | None = None) -> Bench:
    folder.mkdir(exist_ok=True)
    database, clock = folder / "history.sqlite", SimulatedClock()
    return Bench(agent=Agent(source, database, clock, settings or AgentSettings()), clock=clock, database=database)
