"""The clock and memory readings that measurements use, and how often each one is sampled.

Measurements build their tensors and launch their work with torch, the same on every machine; only what depends on a real GPU goes through
`Instruments`: how long something took, and how much memory the process holds. `CardInstruments` read the clock and the driver;
`SimulatedInstruments` answer for a simulated GPU with the seconds that each measurement expects of known figures.
"""

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from tightfit.cost.efficiency import efficiency_of
from tightfit.devices.calibration import Calibration, Measured
from tightfit.devices.device import Device

Expected = Callable[[Calibration | None], float | None]
"""Seconds that something should take on a GPU with this calibration; with None, by the catalogue's figures, which may not know."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes and counts of the measurements. On a simulated GPU tensors hold no data and are as large, real work on the host is smaller."""

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
        """Seconds on the GPU from one event to another; waits for the second."""
        ...

    def seconds_of(self, run: Callable[[], Any], expected: Expected) -> float:
        """Seconds on the host that `run` takes."""
        ...

    def keep_busy(self, seconds: float) -> None:
        """Gives the GPU nothing to do for so long: what is queued meanwhile then runs without gaps."""
        ...

    def process_bytes(self) -> int:
        """GPU memory of this process, as the driver reports it."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """The results of a group of measurements: a row for every figure, and entries of the calibration file by table."""

    rows: Sequence[Measured]
    tables: dict[str, dict[str, Any]]


def summary(name: str, unit: str, samples: Sequence[float], predicted: float | None = None) -> Measured:
    """The row of a figure: median and quartiles of its samples."""
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else [samples[0]] * 3
    return Measured(
        name=name, unit=unit, median=median, low=low, high=high, num_samples=len(samples), predicted=predicted
    )


def seconds_on_card(instruments: Instruments, run: Callable[[], Any], expected: Expected) -> list[float]:
    """Samples of the seconds of one call of `run` on the GPU; a short call is repeated within a sample.

    The host issues all calls of a sample while the GPU is kept busy before its first event. A slow host takes longer to issue a convolution than a fast GPU to run it,
    and would be what is measured: 100 us for convolutions of 33 us, on an H200.
    """
    sizes = instruments.sizes
    # Each sample takes about 2 ms: CUDA events resolve half a microsecond (cudaEventElapsedTime, CUDA Runtime API).
    about = expected(None) or _SAMPLE_SECONDS
    num_calls = max(1, min(sizes.max_calls, round(_SAMPLE_SECONDS / max(about, 1e-9))))

    def run_all() -> None:
        for _ in range(num_calls):
            run()

    def issued(calibration: Calibration | None) -> float:
        return num_calls * efficiency_of(instruments.card, calibration).issue_seconds

    # Warm-up: lazy loading of the kernel, cuDNN's and cuBLAS's choice of an algorithm, the allocator's first segments.
    run()
    torch.cuda.synchronize()
    issue_seconds = instruments.seconds_of(run_all, issued)
    samples = []
    for _ in range(sizes.num_samples):
        torch.cuda.synchronize()
        instruments.keep_busy(_AHEAD * issue_seconds)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run_all()
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
# How much longer the GPU is kept busy than the host took before.
_AHEAD = 2.0
