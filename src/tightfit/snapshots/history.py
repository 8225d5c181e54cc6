"""The history of a run, from a tape or from a recording of torch's allocator: both are replayed, and what each block was is looked up.

An estimate's history has its own peaks, because the tape goes through the same replay with the same limit and workspaces.
"""

from collections.abc import Mapping
from typing import Literal

import numpy as np

from tightfit.cost.roofline import operator_seconds
from tightfit.devices.calibration import Calibration
from tightfit.devices.device import Device
from tightfit.simulate.allocator import CachingAllocator
from tightfit.simulate.blocks import Block
from tightfit.simulate.history import Blocks, History, HistorySpan
from tightfit.simulate.levels import Watch, levels_on
from tightfit.simulate.settings import AllocatorSettings
from tightfit.simulate.workspaces import with_workspaces_of
from tightfit.tape import Column, EventKind, SpanKind, Tape

_MICROSECONDS = 1e6
_SPAN_KINDS: dict[SpanKind, Literal["setup", "step", "aside"]] = {
    SpanKind.SETUP: "setup",
    SpanKind.STEP: "step",
    SpanKind.ASIDE: "aside",
}


def history_of_tape(
    tape: Tape,
    device: Device,
    settings: AllocatorSettings | None = None,
    calibration: Calibration | None = None,
    *,
    watch: Watch | None = None,
) -> History:
    """What `tape` holds on `device`, block by block; its peaks are those that `estimate_peak` finds with the same arguments.

    `time_us` is when the card would have done the operators before each event, one after another, by the roofline. A stack is the one frame
    that a tape knows: the user's line and the operator. `watch` sees the allocator after each event, its blocks by storage.

    Raises:
        UsageError: the calibration was made on another card.
    """
    settings = settings or AllocatorSettings()
    device = device if calibration is None else calibration.applied_to(device)
    tape = with_workspaces_of(device, tape, calibration)
    addresses = np.full(len(tape.storages), -1, dtype=np.int64)
    kinds, storages = tape.events.kind.tolist(), tape.events.storage.tolist()

    def look(event: int, allocator: CachingAllocator, blocks: Mapping[int, Block]) -> None:
        if event >= 0 and kinds[event] == EventKind.ALLOCATE and storages[event] in blocks:
            addresses[storages[event]] = blocks[storages[event]].address
        if watch is not None:
            watch(event, allocator, blocks)

    levels = levels_on(device, tape, settings, watch=look)
    stack, stacks = _stacks(tape)
    module, modules = _modules(tape)
    held = _in_order_of_birth(tape, levels.block_bytes)
    columns = {
        "num_bytes": tape.storages.num_bytes,
        "block_bytes": levels.block_bytes,
        "address": addresses,
        "lane": tape.storages.stream,
        "category": tape.storages.category,
        "stack": stack,
        "module": module,
        **_lifetimes(tape),
    }
    seconds = np.append(0.0, np.cumsum(operator_seconds(tape, device, calibration)))
    return History(
        label=tape.target,
        origin="estimate",
        device=device.name,
        capacity_bytes=device.capacity_bytes,
        context_bytes=device.context_bytes,
        settings=settings,
        allocated=levels.allocated,
        reserved=levels.reserved,
        time_us=(seconds[tape.events.operator] * _MICROSECONDS).astype(np.int64),
        blocks=Blocks(**{name: column[held].astype(np.int64) for name, column in columns.items()}),
        stacks=stacks,
        modules=modules,
        spans=_spans(tape),
        assumptions=tape.assumptions,
    )


def _lifetimes(tape: Tape) -> dict[str, Column]:
    """The events at which each storage is born and dies, the number of events for never."""
    num_storages, num_events = len(tape.storages), len(tape.events)
    lifetimes = {}
    for name, kind in (("born", EventKind.ALLOCATE), ("died", EventKind.FREE)):
        at = np.flatnonzero(tape.events.kind == kind)
        lifetimes[name] = np.full(num_storages, num_events, dtype=np.int64)
        lifetimes[name][tape.events.storage[at]] = at
    return lifetimes


def _in_order_of_birth(tape: Tape, block_bytes: Column) -> Column:
    """The storages that had a block, first born first."""
    born = tape.events.storage[tape.events.kind == EventKind.ALLOCATE]
    return born[block_bytes[born] > 0]


def _stacks(tape: Tape) -> tuple[Column, tuple[tuple[str, ...], ...]]:
    """For each storage a number of the list: one frame, such as `train.py:41 aten.addmm`, or none for what no operator asked for."""
    operators, strings = tape.operators, tape.strings
    of_operator = operators.line.astype(np.int64) * len(strings) + operators.name
    known, index = np.unique(of_operator, return_inverse=True)
    frames = [f"{strings[place // len(strings)]} {strings[place % len(strings)]}".strip() for place in known.tolist()]
    # Number -1 of the appended list is the last: the storages without an operator.
    return np.append(index, len(frames))[tape.storages.operator], (*((frame,) for frame in frames), ())


def _modules(tape: Tape) -> tuple[Column, tuple[str, ...]]:
    known, index = np.unique(tape.operators.module, return_inverse=True)
    names = [tape.strings[name] for name in known.tolist()]
    return np.append(index, len(names))[tape.storages.operator], (*names, "")


def _spans(tape: Tape) -> tuple[HistorySpan, ...]:
    rows = zip(*(column.tolist() for column in tape.spans.columns().values()), strict=True)
    return tuple(
        HistorySpan(name=tape.strings[name], kind=_SPAN_KINDS[SpanKind(kind)], begin=begin, end=end)
        for name, kind, begin, end in rows
    )
