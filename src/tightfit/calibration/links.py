"""Bandwidth of copies between host and GPU, and how copies and matmuls slow each other down.

Three kinds of host memory: a slab of exact size that is mapped and then registered with the driver, memory that torch pins (rounded up to a
power of two), and pageable memory, which the driver copies through a pinned buffer. Rates in both directions at once and beside a matmul are
those of the registered slab.
"""

import dataclasses
import functools
import mmap
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tightfit.calibration.instruments import Expected, Findings, Instruments, seconds_on_card, summary, times
from tightfit.cost.copies import copy_seconds
from tightfit.cost.efficiency import efficiency_of
from tightfit.cost.roofline import kernel_seconds
from tightfit.devices.calibration import Calibration, Measured
from tightfit.units import GIB, format_bytes

WAYS = ("to_card", "from_card")
_SMALL_BYTES = 4096
_PRODUCT_SIDE = 4096
_OVERLAP_SECONDS = 0.03


class RegisteredSlab:
    """Host memory of exactly `num_bytes`, page-aligned, that the GPU can read and write directly until `close`."""

    def __init__(self, num_bytes: int) -> None:
        # Not pin_memory=True: torch's CachingHostAllocator rounds up to a power of two and keeps what is freed.
        self._pages = mmap.mmap(-1, num_bytes)
        self.tensor = torch.frombuffer(self._pages, dtype=torch.uint8)
        _check(_runtime().cudaHostRegister(self.tensor.data_ptr(), num_bytes, 0))

    def close(self) -> None:
        """Unregisters and frees the memory."""
        _check(_runtime().cudaHostUnregister(self.tensor.data_ptr()))
        del self.tensor
        self._pages.close()


def _runtime() -> Any:
    return torch.cuda.cudart()


def _check(status: Any) -> None:
    if int(status) != 0:
        raise RuntimeError(f"the CUDA runtime refuses to register host memory: error {int(status)}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Copies:
    """Copies of one host tensor to the GPU or back."""

    host: torch.Tensor
    card: torch.Tensor

    def run(self, way: str) -> None:
        """Issues one copy on the current stream."""
        target, source = (self.card, self.host) if way == "to_card" else (self.host, self.card)
        target.copy_(source, non_blocking=True)


def links(instruments: Instruments) -> Findings:
    """Bandwidth by direction and kind of host memory, alone, in both directions at once and beside a matmul; and seconds of registering memory."""
    num_bytes = instruments.sizes.slab_bytes
    registering = _registering(instruments)
    slab, second = RegisteredSlab(num_bytes), RegisteredSlab(num_bytes)
    card = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    copies = {
        "registered": _Copies(host=slab.tensor, card=card),
        "pinned": _Copies(host=torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True), card=card),
        # zeros, not empty: pages that were never written would be faulted in during the first copy.
        "pageable": _Copies(host=torch.zeros(num_bytes, dtype=torch.uint8), card=card),
    }
    rows, link = [*registering.rows], {}
    for kind, own in copies.items():
        for way in WAYS:
            expected = functools.partial(_copy_seconds, instruments, num_bytes, kind, way)
            seconds = seconds_on_card(instruments, functools.partial(own.run, way), expected)
            rows.append(_rate(f"{way.replace('_', ' ')}, {kind} memory", num_bytes, seconds, expected))
            link[f"{way}_{kind}_bytes_per_second"] = rows[-1].median
    latency = _latency(instruments, slab.tensor[:_SMALL_BYTES])
    # Buffers of their own on both sides, so that no copy waits for another one's memory.
    both = _both_ways(instruments, copies["registered"], _Copies(host=second.tensor, card=torch.empty_like(card)))
    rows += [latency, *both.values()]
    link |= {"latency_seconds": latency.median} | {key: row.median for key, row in both.items()}
    beside = _beside_a_product(instruments, copies["registered"], link)
    rows += beside.values()
    # The tensors refer to the registered pages, which can be unmapped only when nothing else does.
    del copies
    slab.close()
    second.close()
    overlap = {key: row.median for key, row in beside.items()}
    return Findings(rows=rows, tables={"link": link, "overlap": overlap} | registering.tables)


def _registering(instruments: Instruments) -> Findings:
    num_bytes = instruments.sizes.slab_bytes
    samples, slabs = [], []

    def expected(calibration: Calibration | None) -> float | None:
        return calibration.host["register_seconds_per_gib"] * num_bytes / GIB if calibration else None

    # Three at most: registering pins every page, some hundred milliseconds per GiB.
    for _ in range(min(3, instruments.sizes.num_samples)):
        seconds = instruments.seconds_of(lambda: slabs.append(RegisteredSlab(num_bytes)), expected)
        samples.append(seconds * GIB / num_bytes)
        slabs.pop().close()
    row = summary("registering host memory, per GiB", "s", samples)
    return Findings(rows=[row], tables={"host": {"register_seconds_per_gib": row.median}})


def _copy_seconds(
    instruments: Instruments, num_bytes: int, kind: str, way: str, calibration: Calibration | None
) -> float:
    if calibration is not None and kind not in ("registered", "pageable"):
        return num_bytes / calibration.link[f"{way}_{kind}_bytes_per_second"]
    return copy_seconds(
        num_bytes,
        instruments.card,
        is_pinned=kind != "pageable",
        to_card=way == "to_card",
        calibration=calibration,
    )


def _rate(name: str, num_bytes: int, seconds: Sequence[float], expected: Expected | None = None) -> Measured:
    about = expected(None) if expected else None
    return summary(name, "B/s", [num_bytes / each for each in seconds], about and num_bytes / about)


def _latency(instruments: Instruments, host: torch.Tensor) -> Measured:
    own = _Copies(host=host, card=torch.empty(_SMALL_BYTES, dtype=torch.uint8, device="cuda"))

    def expected(calibration: Calibration | None) -> float:
        return copy_seconds(0, instruments.card, calibration=calibration)

    samples = []
    for _ in range(instruments.sizes.num_samples):
        torch.cuda.synchronize()

        def run() -> None:
            own.run("to_card")
            torch.cuda.synchronize()

        samples.append(instruments.seconds_of(run, expected))
    return summary(f"copy of {format_bytes(_SMALL_BYTES)}, until it has arrived", "s", samples, expected(None))


def together(
    instruments: Instruments, tasks: Mapping[str, tuple[Callable[[], Any], int, Expected]]
) -> dict[str, list[float]]:
    """Seconds of each of several tasks that run at once, each on its own stream. A task is a callable, its number of calls, and their expected seconds."""
    streams = {name: torch.cuda.Stream() for name in tasks}
    samples: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(instruments.sizes.num_samples):
        torch.cuda.synchronize()
        marks = {}
        for name, (run, num_calls, _) in tasks.items():
            with torch.cuda.stream(streams[name]):
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                for _ in range(num_calls):
                    run()
                end.record()
                marks[name] = begin, end
        for name, (_, _, expected) in tasks.items():
            samples[name].append(instruments.seconds_between(*marks[name], expected))
    return samples


def _both_ways(instruments: Instruments, there: _Copies, back: _Copies) -> dict[str, Measured]:
    num_bytes, num_calls = instruments.sizes.slab_bytes, min(4, instruments.sizes.max_calls)
    keys = {way: f"{way}_both_ways_bytes_per_second" for way in WAYS}

    def expected(calibration: Calibration | None, key: str) -> float | None:
        return num_calls * num_bytes / calibration.link[key] if calibration else None

    tasks = {
        way: (functools.partial(own.run, way), num_calls, functools.partial(expected, key=keys[way]))
        for way, own in (("to_card", there), ("from_card", back))
    }
    samples = together(instruments, tasks)
    return {
        keys[way]: _rate(f"{way.replace('_', ' ')}, both ways at once", num_calls * num_bytes, samples[way])
        for way in WAYS
    }


def _beside_a_product(instruments: Instruments, copies: _Copies, link: Mapping[str, float]) -> dict[str, Measured]:
    """The slowdown of a matmul beside copies and of copies beside a matmul; both run long enough to overlap almost all the time."""
    matrix = torch.randn(_PRODUCT_SIDE, _PRODUCT_SIDE, device="cuda", dtype=torch.float16)
    product = functools.partial(torch.mm, matrix, matrix, out=torch.empty_like(matrix))

    def product_seconds(calibration: Calibration | None) -> float:
        flops, num_bytes = 2.0 * _PRODUCT_SIDE**3, 6 * _PRODUCT_SIDE**2
        efficiency = efficiency_of(instruments.card, calibration)
        return kernel_seconds(instruments.card, efficiency, "matmul", "float16", flops=flops, num_bytes=num_bytes)

    alone = {"product": statistics.median(seconds_on_card(instruments, product, product_seconds))}
    num_bytes = instruments.sizes.slab_bytes
    rows = {}
    for way in WAYS:
        alone[way] = num_bytes / link[f"{way}_registered_bytes_per_second"]
        names = {"product": f"product_beside_{way}", way: f"{way}_beside_product"}
        expected = {
            "product": product_seconds,
            way: functools.partial(_copy_seconds, instruments, num_bytes, "registered", way),
        }
        calls = {"product": product, way: functools.partial(copies.run, way)}
        most = 10 * instruments.sizes.max_calls
        counts = {name: max(1, min(most, round(_OVERLAP_SECONDS / alone[name]))) for name in calls}

        def slower(calibration: Calibration | None, name: str, names: Any = names, expected: Any = expected) -> Any:
            return expected[name](calibration) * (calibration.overlap[names[name]] if calibration else 1.0)

        tasks = {
            name: (calls[name], counts[name], times(counts[name], functools.partial(slower, name=name)))
            for name in calls
        }
        for name, samples in together(instruments, tasks).items():
            ratios = [seconds / (counts[name] * alone[name]) for seconds in samples]
            rows[names[name]] = summary(names[name].replace("_", " "), "times as long", ratios)
    return rows
