"""What a measurement may ask of the machine that it runs on, and how many times it asks.

Measurements build their tensors and launch their work with torch, the same on every machine; only what depends on a real card is asked here: how long
something took, and what the driver says of the process. `CardInstruments` read the clock and the driver; `SimulatedInstruments` answer for a card
that is not there, with the seconds that each measurement expects of a card with known figures.
"""

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from tightfit.devices.calibration import Calibration, Measured
from tightfit.devices.device import Device

Expected = Callable[[Calibration | None], float | None]
"""Seconds that something should take on a card with these figures measured; of the catalogue's figures (None) it may not be known."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is measured. Card tensors are as large on a simulated card, which holds no data; what the host really does is smaller there."""

    num_samples: int
    max_calls: int
    slab_bytes: int
    num_host_parameters: int
    num_threads: tuple[int, ...]
    disk_bytes: int
    disk_block_bytes: int


class Instruments(Protocol):
    """The clock and the driver of a machine."""

    card: Device
    is_virtual: bool
    sizes: Sizes

    def seconds_between(self, begin: torch.cuda.Event, end: torch.cuda.Event, expected: Expected) -> float:
        """Seconds on the card from one event to another; waits for the second."""
        ...

    def seconds_of(self, run: Callable[[], Any], expected: Expected) -> float:
        """Seconds on the host that `run` takes."""
        ...

    def process_bytes(self) -> int:
        """What this process holds on the card, as the driver says."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What a group of measurements found: a row for every figure, and entries of the calibration file by table."""

    rows: Sequence[Measured]
    tables: dict[str, dict[str, Any]]


def summary(name: str, unit: str, samples: Sequence[float], predicted: float | None = None) -> Measured:
    """The row of a figure: median and quartiles of its samples."""
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else [samples[0]] * 3
    return Measured(
        name=name, unit=unit, median=median, low=low, high=high, num_samples=len(samples), predicted=predicted
    )


def seconds_on_card(instruments: Instruments, run: Callable[[], Any], expected: Expected) -> list[float]:
    """Seconds of one call of `run` on the card, sampled; a short call is repeated within a sample, which hides how long it takes to issue."""
    sizes = instruments.sizes
    about = expected(None) or _SAMPLE_SECONDS
    num_calls = max(1, min(sizes.max_calls, round(_SAMPLE_SECONDS / max(about, 1e-9))))
    run()
    samples = []
    for _ in range(sizes.num_samples):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(num_calls):
            run()
        end.record()
        samples.append(instruments.seconds_between(begin, end, times(num_calls, expected)) / num_calls)
    return samples


def times(count: float, expected: Expected) -> Expected:
    """`count` times as long."""

    def longer(calibration: Calibration | None) -> float | None:
        seconds = expected(calibration)
        return None if seconds is None else count * seconds

    return longer


_SAMPLE_SECONDS = 2e-3
