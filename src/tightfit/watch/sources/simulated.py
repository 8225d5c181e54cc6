"""Cards and processes that do not exist, for machines without cards: the same at each moment for the same seed, whoever asks and how often.

A card has a number of places, and each place a process after the other: some hold their memory on a few levels, some have bursts of seconds, some leak. All is worked out from
the time and from hashes of (seed, place, life), for all places at once, so that a reading costs tens of microseconds and a day can be skipped.
"""

import dataclasses
import re

import numpy as np
from numpy.typing import NDArray

from tightfit.errors import UsageError
from tightfit.units import GIB, MIB
from tightfit.watch.machine.readings import CardReading, ProcessFacts, ProcessReading, Reading
from tightfit.watch.sources.abstract_source import AbstractSource, SourceLost

_Hashes = NDArray[np.uint64]

_TOTAL_BYTES = 80 * GIB
_DRIVER_BYTES = 500 * MIB
_MIN_LIFE_SECONDS, _MAX_LIFE_SECONDS = 40 * 60, 10 * 3600
_SHARE_ALIVE = 0.92
"""Of the time a place is taken, the rest passes between two processes."""
_RAMP_SECONDS, _LEVEL_SECONDS, _BURST_SECONDS = 20.0, 900.0, 6.0
_LEAK_SECONDS = 45.0
_FIRST_PID = 20_000
_MAX_PROCESSES = 100_000
_USERS = ("ada", "grace", "edsger", "barbara", "alan")
_COMMANDS = (
    "python train.py --config llama-8b.yaml --micro-batch {n}",
    "python -m vllm.entrypoints.openai.api_server --model qwen-{n}b",
    "python finetune.py --rank {n} --resume runs/{n}/last.ckpt",
    "/opt/conda/bin/python eval.py --shard {n}",
    "torchrun --nproc-per-node 8 pretrain.py --seed {n}",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedMachine:
    """How many cards, how many processes on each, and the seed. `lost_between` is a span (Unix seconds) in which the driver does not answer."""

    num_cards: int = 2
    num_processes: int = 6
    seed: int = 0
    lost_between: tuple[float, float] | None = None


def parse_machine(text: str) -> SimulatedMachine:
    """`8x50` is eight cards with fifty processes each, `8x50:7` the same with seed 7.

    Raises:
        UsageError: it is none of these, or too many.
    """
    found = re.fullmatch(r"(\d{1,4})x(\d{1,5})(?::(\d{1,9}))?", text.strip().lower())
    if found is None:
        raise UsageError(f"--simulate {text}: write cards x processes of each, such as 8x50, or with a seed, 8x50:7")
    cards, processes, seed = int(found[1]), int(found[2]), int(found[3] or 0)
    if not 1 <= cards <= 1024 or cards * processes > _MAX_PROCESSES:
        raise UsageError(f"--simulate {text}: at least one card, at most 1024, and at most {_MAX_PROCESSES} processes")
    return SimulatedMachine(num_cards=cards, num_processes=processes, seed=seed)


class SimulatedSource(AbstractSource):
    """The simulated machine."""

    name = "simulated"

    def __init__(self, machine: SimulatedMachine) -> None:
        self._machine = machine
        places = np.arange(machine.num_cards * machine.num_processes, dtype=np.uint64)
        self._places = _mixed(places + (np.uint64(machine.seed) << np.uint64(32)))
        self._card_of = (places // np.uint64(max(1, machine.num_processes))).astype(np.int64)
        lives = _uniform(_mixed(self._places + np.uint64(1)))
        self._life_seconds = np.floor(_MIN_LIFE_SECONDS + lives**2 * (_MAX_LIFE_SECONDS - _MIN_LIFE_SECONDS))
        self._begin = np.floor(_uniform(_mixed(self._places + np.uint64(2))) * self._life_seconds)
        self._uuids = tuple(f"SIM-{machine.seed:08x}-{index:04d}" for index in range(machine.num_cards))
        self._facts: dict[int, ProcessFacts] = {}
        self._last: dict[int, ProcessReading] = {}

    def read(self, now: float) -> Reading:
        lost = self._machine.lost_between
        if lost is not None and lost[0] <= now < lost[1]:
            raise SourceLost("the simulated driver is away")
        life, age = self._lives(now)
        sizes = self._sizes(life, age)
        is_alive = age < _SHARE_ALIVE * self._life_seconds
        pids = self._pids(life)
        alive = np.flatnonzero(is_alive)
        totals = np.bincount(self._card_of[alive], sizes[alive], self._machine.num_cards)
        counts = np.bincount(self._card_of[alive], minlength=self._machine.num_cards)
        self._remember(now, alive, pids, life)
        processes = self._readings(self._card_of[alive].tolist(), pids[alive].tolist(), sizes[alive].tolist())
        busy = _uniform(_mixed(_mixed(np.arange(len(totals), dtype=np.uint64)) + np.uint64(int(now))))
        cards = tuple(
            CardReading(
                uuid=self._uuids[index],
                index=index,
                name="Simulated 80GB",
                vendor="tightfit",
                driver="simulated",
                total_bytes=_TOTAL_BYTES,
                used_bytes=int(totals[index]) + _DRIVER_BYTES,
                utilization=round(0.5 + busy[index] / 2, 2) if counts[index] else 0.0,
                power_watts=round(70.0 + 500.0 * busy[index], 1) if counts[index] else 70.0,
                temperature_celsius=float(int(35 + 40 * busy[index])) if counts[index] else 31.0,
            )
            for index in range(self._machine.num_cards)
        )
        return Reading(cards=cards, processes=processes)

    def facts(self, pid: int) -> ProcessFacts:
        unknown = ProcessFacts(pid=pid, identity="?", started=None, user="?", command="?", container="")
        return self._facts.get(pid, unknown)

    def close(self) -> None:
        self._facts.clear()

    def _readings(self, cards: list[int], pids: list[int], sizes: list[int]) -> tuple[ProcessReading, ...]:
        """The readings of all processes; those that are as they were are not made again."""
        before, found = self._last, {}
        for card, pid, size in zip(cards, pids, sizes, strict=True):
            reading = before.get(pid)
            if reading is None or reading.used_bytes != size:
                reading = ProcessReading(card=self._uuids[card], pid=pid, used_bytes=size)
            found[pid] = reading
        self._last = found
        return tuple(found.values())

    def _lives(self, now: float) -> tuple[_Hashes, NDArray[np.float64]]:
        """Which life each place is in, counted from 1970, and for how many seconds it has been."""
        since = now - self._begin
        life = np.floor(since / self._life_seconds)
        return life.astype(np.int64).astype(np.uint64), since - life * self._life_seconds

    def _sizes(self, life: _Hashes, age: NDArray[np.float64]) -> NDArray[np.int64]:
        """Bytes of each place. All places of a card stay below its memory together: a place has a share, and no process outgrows it."""
        share = 0.97 * (_TOTAL_BYTES - _DRIVER_BYTES) / max(1, self._machine.num_processes)
        draw = _mixed(self._places + life * np.uint64(0x9E3779B97F4A7C15))
        kind, size = _uniform(draw), 0.6 + 0.4 * _uniform(_mixed(draw + np.uint64(1)))
        ramp = np.minimum(1.0, 0.4 + 0.2 * np.floor(age / _RAMP_SECONDS))
        epoch = np.floor(age / _LEVEL_SECONDS).astype(np.uint64)
        level = 0.8 + 0.1 * np.floor(3 * _uniform(_mixed(draw + np.uint64(3) * epoch)))
        instant = np.floor(age / _BURST_SECONDS).astype(np.uint64)
        burst = np.where(_uniform(_mixed(draw + np.uint64(5) * instant)) < 0.02, 1.3, 1.0)
        leak = 1.0 + np.floor(age / _LEAK_SECONDS) * _LEAK_SECONDS / self._life_seconds
        # Six in ten hold their level, two have bursts, two leak until they end; none above its share.
        factor = np.where(kind < 0.6, size * level, np.where(kind < 0.8, size / 1.3 * burst, 0.5 * leak))
        return (np.floor(ramp * factor * share / (2 * MIB)) * (2 * MIB)).astype(np.int64)

    def _pids(self, life: _Hashes) -> NDArray[np.int64]:
        # Two lives of a place differ, and so do two places.
        return _FIRST_PID + np.arange(len(life)) + len(life) * (life % np.uint64(997)).astype(np.int64)

    def _remember(self, now: float, alive: NDArray[np.intp], pids: NDArray[np.int64], life: _Hashes) -> None:
        """Makes up who the processes are that are new, and forgets those that have ended."""
        living = pids[alive].tolist()
        if len(living) == len(self._facts) and all(pid in self._facts for pid in living):
            return
        old, self._facts = self._facts, {}
        for place, pid in zip(alive.tolist(), living, strict=True):
            started = float(self._begin[place] + float(life[place]) * self._life_seconds[place])
            self._facts[pid] = old.get(pid) or _made_up(pid, int(self._places[place]) % 9973, started)


def _made_up(pid: int, number: int, started: float) -> ProcessFacts:
    return ProcessFacts(
        pid=pid,
        identity=f"simulated:{started:.0f}",
        started=started,
        user=_USERS[number % len(_USERS)],
        command=_COMMANDS[number // 5 % len(_COMMANDS)].format(n=number % 64 + 1),
        container=f"docker {(number + 1) * 0x9E3779B97F4A7 % (1 << 48):012x}" if number % 3 == 0 else "",
    )


def _mixed(values: _Hashes) -> _Hashes:
    """A hash of each value, (n,): the finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _uniform(hashes: _Hashes) -> NDArray[np.float64]:
    """A number from 0 up to 1 for each hash."""
    return (hashes >> np.uint64(11)).astype(np.float64) / float(1 << 53)
