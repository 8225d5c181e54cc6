"""The estimate of a tape on a GPU, as plain data: three peaks with their range, allocation sites, steps, and seconds."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from tightfit.simulate.input_pipeline import InputPipeline
from tightfit.simulate.seconds_band import SecondsBand
from tightfit.simulate.throughput import StepCounts
from tightfit.tape import Assumption, Coverage
from tightfit.units import format_bytes

SCHEMA = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The peaks of allocated bytes, of reserved bytes and of the process's GPU memory, and the range of the last."""

    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int
    device_low_bytes: int
    device_high_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SpanPeak:
    """A step, the set-up before it, or something that the script did outside of steps."""

    name: str
    kind: str
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    end_allocated_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SiteAtPeak:
    """An allocation site at the peak: blocks of one category that the same line allocated in modules of one kind."""

    category: str
    module: str
    operator: str
    line: str
    num_storages: int
    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PeakMoment:
    """The time step of the allocated peak: the span, the phase and the operator that was running."""

    span: str
    phase: str
    operator: str
    module: str
    line: str


CONTEXT = "CUDA context"
COMMUNICATORS = "buffers of NCCL"
BESIDE_THE_ALLOCATOR = frozenset({CONTEXT, COMMUNICATORS})
"""Causes of uncertainty that have nothing to do with what is allocated."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """One cause of uncertainty of the device peak, and how far it can move the peak down and up."""

    cause: str
    less_bytes: int
    more_bytes: int


MARGINS = ("0", "likely", "safe")
"""Which end of the range of a peak has to fit: the lower one, the likely peak, or the upper one."""


def needed_bytes(peak: Peak, margin: str) -> int:
    """The bytes that have to be there with one of the `MARGINS`."""
    return {"0": peak.device_low_bytes, "likely": peak.device_bytes, "safe": peak.device_high_bytes}[margin]


def verdict_of(peak: Peak, limit_bytes: int, margin: str, *, is_whole: bool = True) -> str:
    """Whether a peak fits a limit, in words that are the same for an estimate and a plan. One whose upper end exceeds the limit does not simply "fit",
    whatever the margin is; one that fits at the lower end alone is said to do so only where that was asked for. Where not all of the program was seen (`is_whole`), it fits as far as seen.
    """
    seen = "" if is_whole else " as far as seen"
    if peak.device_high_bytes <= limit_bytes:
        return f"fits{seen}"
    if peak.device_bytes <= limit_bytes:
        return f"fits{seen} without the safety margin"
    if peak.device_low_bytes <= limit_bytes and margin == "0":
        return f"fits at best{seen}"
    return "does not fit"


def peak_of_limit(peak: Peak, limit_bytes: int) -> str:
    """`8.00 GiB of 9.00 GiB`; the whole range where the likely peak is above the limit: its lower end alone can fit."""
    likely, limit = format_bytes(peak.device_bytes), format_bytes(limit_bytes)
    if peak.device_bytes <= limit_bytes:
        return f"{likely} of {limit}"
    return (
        f"{format_bytes(peak.device_low_bytes)} to {format_bytes(peak.device_high_bytes)}, likely {likely}, of {limit}"
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The memory and time of a workload on a GPU. `at_peak` adds up to `peak.device_bytes`. `margin`, one of the `MARGINS`, decides whether it fits;
    `coverage` says what of the program was seen. `pinned_peak_bytes` of the host's memory are reserved by torch's allocator of pinned memory, for tensors of
    `pinned_tensor_bytes`; `disk_peak_bytes` are in files of techniques. In `idle_seconds_per_step` of a step the GPU runs no kernel: it waits for the host, or for copies.
    `seconds_band` is the range of `seconds_per_step`, and `counts` what a step does in them; None without a whole step. `input_pipeline` is what feeds the steps,
    whose loading is not among their seconds.
    """

    target: str
    device: str
    capacity_bytes: int
    peak: Peak
    at_peak: Mapping[str, int]
    moment: PeakMoment
    allocation_sites: tuple[SiteAtPeak, ...]
    spans: tuple[SpanPeak, ...]
    band: tuple[Band, ...]
    host_peak_bytes: int
    seconds_per_step: float
    versions: Mapping[str, str]
    assumptions: tuple[Assumption, ...]
    coverage: Coverage = Coverage()
    margin: str = "likely"
    pinned_peak_bytes: int = 0
    pinned_tensor_bytes: int = 0
    idle_seconds_per_step: float = 0.0
    disk_peak_bytes: int = 0
    seconds_band: SecondsBand | None = None
    counts: StepCounts | None = None
    input_pipeline: InputPipeline | None = None

    @property
    def fits(self) -> bool:
        """Whether the device peak is within the GPU's capacity, at the end of its range that the margin names."""
        return needed_bytes(self.peak, self.margin) <= self.capacity_bytes

    @property
    def headroom_bytes(self) -> int:
        """What the likely device peak leaves free; negative if it does not fit."""
        return self.capacity_bytes - self.peak.device_bytes

    def per_second(self, count: int | None) -> float | None:
        """How many of what a step has `count` of there are in a second; None where either is not known."""
        return count / self.seconds_per_step if count and self.seconds_per_step else None

    def to_json(self) -> dict[str, Any]:
        """The object that `tightfit estimate --json` prints, without `elapsed_seconds`."""
        steps = [s for s in self.spans if s.kind == "step"]
        return {
            "schema": SCHEMA,
            "target": self.target,
            "device": {"name": self.device, "capacity_bytes": self.capacity_bytes},
            "peak": dataclasses.asdict(self.peak),
            "fits": self.fits,
            "margin": self.margin,
            "headroom_bytes": self.headroom_bytes,
            "at_peak": dict(self.at_peak),
            "moment": dataclasses.asdict(self.moment),
            "holders": [dataclasses.asdict(site) for site in self.allocation_sites],
            "steps": [{k: v for k, v in dataclasses.asdict(s).items() if k.endswith("_bytes")} for s in steps],
            "spans": [dataclasses.asdict(s) for s in self.spans],
            "band": [dataclasses.asdict(b) for b in self.band],
            "host": {
                "peak_bytes": self.host_peak_bytes,
                "pinned_bytes": self.pinned_peak_bytes,
                "pinned_tensor_bytes": self.pinned_tensor_bytes,
            },
            "disk": {"peak_bytes": self.disk_peak_bytes},
            "seconds_per_step": self.seconds_per_step,
            "idle_seconds_per_step": self.idle_seconds_per_step,
            **self._seconds_to_json(),
            "input_pipeline": None if self.input_pipeline is None else self.input_pipeline.to_json(),
            "versions": dict(self.versions),
            "assumptions": [dataclasses.asdict(a) for a in self.assumptions],
            "coverage": self.coverage.to_json(),
        }

    def _seconds_to_json(self) -> dict[str, Any]:
        band, counts = self.seconds_band, self.counts
        causes = {} if band is None else {name: (band.less[name], more) for name, more in band.more.items()}
        return {
            "seconds_low_per_step": None if band is None else band.low_seconds,
            "seconds_high_per_step": None if band is None else band.high_seconds,
            # What one cause alone does: the causes are added as squares, together with what differs from machine to machine.
            "seconds_band": [
                {
                    "cause": name,
                    "less_seconds": self.seconds_per_step * -math.expm1(-less),
                    "more_seconds": self.seconds_per_step * math.expm1(more),
                }
                for name, (less, more) in causes.items()
            ],
            "tokens_per_second": None if counts is None else self.per_second(counts.num_tokens),
            "samples_per_second": None if counts is None else self.per_second(counts.num_samples),
            "examples_per_second": None if counts is None else self.per_second(counts.num_examples),
            "flops_per_step": None if counts is None else counts.flops,
            "model_flops_per_step": None if counts is None else counts.model_flops,
            "model_flops_utilisation": None if counts is None else counts.utilisation,
        }
