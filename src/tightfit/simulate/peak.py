"""From a tape to an estimate: replays the events through the simulated allocator of a GPU and reads off the peaks.

The likely peak comes from the likely sizes, on a GPU of the given capacity: a library that finds no memory for its workspace does without it, as
cuDNN does. The range comes from replays under other assumptions (`tightfit.simulate.band`).
"""

import dataclasses

import numpy as np

from tightfit.allocator.settings import AllocatorSettings
from tightfit.cost.attention_plans import plans_on_the_way
from tightfit.cost.traced_collectives import traced_communicator_bytes
from tightfit.devices.calibration import Calibration
from tightfit.devices.device import Device
from tightfit.devices.node import Node
from tightfit.simulate.band import reserved_band
from tightfit.simulate.communicators import beside
from tightfit.simulate.contention import with_contention
from tightfit.simulate.estimate import COMMUNICATORS, CONTEXT, Band, Estimate, Peak, PeakMoment, SiteAtPeak, SpanPeak
from tightfit.simulate.input_pipeline import input_pipeline
from tightfit.simulate.seconds_band import seconds_band
from tightfit.simulate.step_work import priced
from tightfit.simulate.throughput import counts_of_step
from tightfit.simulate.timeline import busy_seconds_of_steps, seconds_of_steps
from tightfit.simulate.timeline_bytes import MemoryTimeline, timeline_on
from tightfit.simulate.workspaces import libraries_of, with_workspaces_of
from tightfit.tape import Category, Column, EventKind, Phase, SpanKind, Tape

# The buffers follow the number of channels, which NCCL chooses by the links that it finds.
_COMMUNICATORS_DOUBT = 0.5

# What fits a screen; the JSON has as many, so that both say the same.
NUM_SITES = 12


def estimate_peak(
    tape: Tape,
    device: Device,
    settings: AllocatorSettings | None = None,
    calibration: Calibration | None = None,
    *,
    node: Node | None = None,
    used_bytes: int = 0,
) -> Estimate:
    """The estimate of `tape` on `device`, of which other processes have `used_bytes` besides, with the context, workspaces and speeds that `calibration` measured. An empty tape
    needs the context only. The collectives and communicators of a distributed program are those of `node`.

    Raises:
        UsageError: the calibration was made on another GPU.
    """
    settings = settings or AllocatorSettings()
    device = as_usable(device, tape, settings, calibration, used_bytes=used_bytes)
    # The tape may have been traced for another GPU, whose cuBLAS workspace has another size.
    tape = with_workspaces_of(device, tape, calibration)
    communicators = 0 if node is None else traced_communicator_bytes(tape, node)
    timeline = timeline_on(beside(device, communicators), tape, settings)
    peak_reserved, peak_allocated = int(timeline.reserved.max(initial=0)), int(timeline.allocated.max(initial=0))
    band = (
        Band(
            cause=CONTEXT,
            less_bytes=device.context_bytes - device.context_low_bytes,
            more_bytes=device.context_high_bytes - device.context_bytes,
        ),
        *reserved_band(
            tape, settings, timeline, room_bytes=device.capacity_bytes - device.context_low_bytes - communicators
        ),
    )
    if communicators:
        off = round(_COMMUNICATORS_DOUBT * communicators)
        band = (*band, Band(cause=COMMUNICATORS, less_bytes=off, more_bytes=off))
    device_bytes = peak_reserved + device.context_bytes + communicators
    at = int(timeline.allocated.argmax()) if len(timeline.allocated) else 0
    alive = _alive(tape, at)
    at_peak = {c.name.lower(): int(timeline.block_bytes[alive & (tape.storages.category == c)].sum()) for c in Category}
    if tape.num_ranks > 1:
        at_peak["nccl"] = communicators
    elif not at_peak["communication"]:
        # One process alone has it too where it makes a group, as with DistributedDataParallel.
        del at_peak["communication"]
    # The allocated and the reserved peak need not coincide; their difference is stated as cache so that the categories add up to
    # the device peak.
    at_peak |= {"cache": peak_reserved - peak_allocated, "context": device.context_bytes}
    prices = with_contention(priced(tape, device, calibration, node=node))
    seconds, busy = seconds_of_steps(prices), busy_seconds_of_steps(prices)
    return Estimate(
        target=tape.target,
        device=device.name,
        capacity_bytes=device.capacity_bytes,
        peak=Peak(
            allocated_bytes=peak_allocated,
            reserved_bytes=peak_reserved,
            device_bytes=device_bytes,
            # The causes are added as if they all occurred at once: a bound rather than a likely range.
            device_low_bytes=device_bytes - sum(b.less_bytes for b in band),
            device_high_bytes=device_bytes + sum(b.more_bytes for b in band),
        ),
        at_peak=at_peak,
        moment=_moment(tape, at),
        allocation_sites=_allocation_sites(tape, alive, timeline.block_bytes),
        spans=_span_peaks(tape, timeline),
        band=band,
        host_peak_bytes=tape.host_peak_bytes,
        disk_peak_bytes=tape.disk_peak_bytes,
        pinned_peak_bytes=tape.pinned_peak_bytes,
        pinned_tensor_bytes=tape.pinned_tensor_bytes,
        # The last step stands for all: the first one also allocates the optimizer's states.
        seconds_per_step=seconds[-1] if seconds else 0.0,
        idle_seconds_per_step=max(0.0, seconds[-1] - busy[-1]) if seconds else 0.0,
        seconds_band=seconds_band(prices, device, calibration) if seconds and seconds[-1] else None,
        counts=counts_of_step(tape, device, seconds[-1]) if seconds and seconds[-1] else None,
        input_pipeline=input_pipeline(prices, device, calibration) if seconds else None,
        versions=tape.versions,
        assumptions=(*tape.assumptions, *plans_on_the_way(tape, device, calibration)),
        coverage=tape.coverage,
    )


def as_usable(
    device: Device,
    tape: Tape,
    settings: AllocatorSettings,
    calibration: Calibration | None,
    *,
    used_bytes: int = 0,
) -> Device:
    """The GPU as it was measured, and as large as the allocator may use it: a fraction is one of what that may reserve, beside which the context is, and of all of
    the GPU, with what other processes have."""
    device = device if calibration is None else calibration.applied_to(device, libraries_of(tape))
    fraction = min(tape.memory_fraction, settings.per_process_memory_fraction)
    allowed_bytes = int(fraction * (device.capacity_bytes + used_bytes)) + device.context_bytes
    return dataclasses.replace(device, capacity_bytes=min(device.capacity_bytes, allowed_bytes))


def _alive(tape: Tape, at: int) -> Column:
    """Which storages are allocated just after event `at`."""
    kind, storage = tape.events.kind[: at + 1], tape.events.storage[: at + 1]
    alive = np.zeros(len(tape.storages), dtype=bool)
    alive[storage[kind == EventKind.ALLOCATE]] = True
    alive[storage[kind == EventKind.FREE]] = False
    return alive


def _moment(tape: Tape, at: int) -> PeakMoment:
    names = [
        tape.strings[tape.spans.name[i]]
        for i in range(len(tape.spans))
        if tape.spans.begin[i] <= at < tape.spans.end[i]
    ]
    # An event counts the operators before it, so the one that is running is the last of them.
    operator = int(tape.events.operator[at]) - 1 if len(tape.events) else -1
    if operator < 0:
        return PeakMoment(span=names[0] if names else "", phase="other", operator="", module="", line="")
    operators, strings = tape.operators, tape.strings
    return PeakMoment(
        span=names[0] if names else "",
        phase=Phase(operators.phase[operator]).name.lower(),
        operator=strings[operators.name[operator]],
        module=strings[operators.module[operator]],
        line=strings[operators.line[operator]],
    )


def _allocation_sites(tape: Tape, alive: Column, block_bytes: Column) -> tuple[SiteAtPeak, ...]:
    """The largest allocation sites. Storages of one category, line and operator are grouped; numbers in module paths become `*`."""
    groups: dict[tuple[str, str, str, str], list[int]] = {}
    operators, strings = tape.operators, tape.strings
    for storage in np.flatnonzero(alive).tolist():
        operator = int(tape.storages.operator[storage])
        module = line = name = ""
        if operator >= 0:
            name, line = strings[operators.name[operator]], strings[operators.line[operator]]
            module = ".".join(
                "*" if part.isdigit() else part for part in strings[operators.module[operator]].split(".")
            )
        category = Category(tape.storages.category[storage]).name.lower()
        group = groups.setdefault((category, module, name, line), [0, 0])
        group[0] += 1
        group[1] += int(block_bytes[storage])
    largest = sorted(groups.items(), key=lambda item: -item[1][1])[:NUM_SITES]
    return tuple(
        SiteAtPeak(category=c, module=m, operator=o, line=l, num_storages=n, num_bytes=b)
        for (c, m, o, l), (n, b) in largest
    )


def _span_peaks(tape: Tape, timeline: MemoryTimeline) -> tuple[SpanPeak, ...]:
    """One entry per name of a span, in order of first appearance; the pieces of an interrupted span are merged."""
    pieces: dict[tuple[str, int], list[slice]] = {}
    for name, kind, begin, end in zip(*(c.tolist() for c in tape.spans.columns().values()), strict=True):
        pieces.setdefault((tape.strings[name], kind), []).append(slice(begin, end))
    return tuple(
        SpanPeak(
            name=name,
            kind=SpanKind(kind).name.lower(),
            peak_allocated_bytes=max(int(timeline.allocated[s].max()) for s in slices),
            peak_reserved_bytes=max(int(timeline.reserved[s].max()) for s in slices),
            end_allocated_bytes=int(timeline.allocated[slices[-1]][-1]),
        )
        for (name, kind), slices in pieces.items()
    )
