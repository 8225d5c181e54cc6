"""The memory timeline of a tape: allocated and reserved bytes after each event, with or without a limit."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from tightfit.allocator.caching import CachingAllocator, OutOfDeviceMemory
from tightfit.allocator.plain_replay import BeyondPlain, PlainReplay, is_plain
from tightfit.allocator.pools import Block
from tightfit.allocator.replay_tape import TapeReplay
from tightfit.allocator.settings import AllocatorSettings
from tightfit.devices.device import Device
from tightfit.tape import Column, EventKind, Source, Tape

Watch = Callable[[int, CachingAllocator, Mapping[int, Block]], None]
"""Called after each event of a replay, with its index, the allocator and the blocks in use; with -1 before the first event of an attempt."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTimeline:
    """Allocated and reserved bytes after each event, the rounded block size of each storage, and how many segments emptied caches gave back."""

    allocated: Column
    reserved: Column
    block_bytes: Column
    num_returned: int


def replay_timeline(
    tape: Tape,
    settings: AllocatorSettings,
    *,
    num_bytes: Column | None = None,
    order: Column | None = None,
    capacity_bytes: int | None = None,
    watch: Watch | None = None,
) -> MemoryTimeline:
    """Replays the events of `tape`, by default with its likely sizes and in its own order. Storages of 0 bytes are skipped.

    With `capacity_bytes`, the limit on reserved bytes, a cuDNN workspace that does not fit is skipped too. A share of the GPU that the program or
    `settings` allow is taken of it already (`tightfit.simulate.peak.as_usable`). `watch` is called with the allocator and its blocks by storage
    after each event.

    Raises:
        OutOfDeviceMemory: anything else does not fit.
    """
    # torch collects garbage, and counts whole segments, below such a share only; what the GPU has is no limit of the allocator.
    has_share = min(tape.memory_fraction, settings.per_process_memory_fraction) < 1
    settings = dataclasses.replace(settings, per_process_memory_fraction=1.0)
    if watch is None and is_plain(settings):
        with contextlib.suppress(BeyondPlain):
            return _plain_timeline(tape, num_bytes=num_bytes, order=order, capacity_bytes=capacity_bytes)
    allowed_bytes, total_bytes = (capacity_bytes, None) if has_share else (None, capacity_bytes)
    replay = TapeReplay(CachingAllocator(settings, capacity_bytes=allowed_bytes, total_bytes=total_bytes))
    allocator = replay.allocator
    num_events = len(tape.events)
    allocated, reserved = [0] * num_events, [0] * num_events
    block_bytes, num_returned = [0] * len(tape.storages), 0
    sizes = (tape.storages.num_bytes if num_bytes is None else num_bytes).tolist()
    # Lists instead of arrays: indexing a numpy array element by element is several times slower, and this is the hot loop.
    streams, sources = tape.storages.stream.tolist(), tape.storages.source
    columns = (tape.events.kind, tape.events.storage, tape.events.value)
    if watch is not None:
        watch(-1, allocator, replay.blocks)
    events = zip(*((c if order is None else c[order]).tolist() for c in columns), strict=True)
    for at, (kind, storage, value) in enumerate(events):
        if storage < 0 or sizes[storage]:
            num_segments = allocator.num_segments if kind == EventKind.EMPTY_CACHE else 0
            try:
                replay.feed(kind, storage, sizes, streams, value)
            except OutOfDeviceMemory:
                if sources[storage] != Source.CUDNN:
                    raise
                # torch tries cuDNN's plans in turn and skips one whose workspace does not fit (try_plans in
                # aten/src/ATen/native/cudnn/Conv_v8.cpp). With size 0 the storage's free event is skipped as well.
                sizes[storage] = 0
            else:
                if kind == EventKind.ALLOCATE:
                    block_bytes[storage] = replay.blocks[storage].size
                elif kind == EventKind.EMPTY_CACHE:
                    num_returned += num_segments - allocator.num_segments
        allocated[at] = allocator.allocated_bytes
        reserved[at] = allocator.reserved_bytes
        if watch is not None:
            watch(at, allocator, replay.blocks)
    return MemoryTimeline(
        allocated=np.asarray(allocated, dtype=np.int64),
        reserved=np.asarray(reserved, dtype=np.int64),
        block_bytes=np.asarray(block_bytes, dtype=np.int64),
        num_returned=num_returned,
    )


def _plain_timeline(
    tape: Tape, *, num_bytes: Column | None, order: Column | None, capacity_bytes: int | None
) -> MemoryTimeline:
    """As `replay_timeline`, with the default settings.

    Raises:
        BeyondPlain: only the allocator that knows all settings can tell.
    """
    sizes = tape.storages.num_bytes if num_bytes is None else num_bytes
    kind, storage = (c if order is None else c[order] for c in (tape.events.kind, tape.events.storage))
    replay = PlainReplay(len(tape.storages), capacity_bytes)
    replay.run(zip(kind.tolist(), storage.tolist(), strict=True), sizes.tolist(), tape.storages.stream.tolist())
    block_bytes = np.asarray(replay.block_bytes, dtype=np.int64)
    change = np.zeros(len(kind), dtype=np.int64)
    for sign, of_kind in ((1, kind == EventKind.ALLOCATE), (-1, kind == EventKind.FREE)):
        change[of_kind] = sign * block_bytes[storage[of_kind]]
    # By how much it changes at each event: filling the rest of the column at each would take the square of their number.
    at, reserved_bytes = np.array(replay.reserved, dtype=np.int64).reshape(-1, 2).T
    grown = np.zeros(len(kind), dtype=np.int64)
    np.add.at(grown, at, np.diff(reserved_bytes, prepend=0))
    return MemoryTimeline(
        allocated=np.cumsum(change),
        reserved=np.cumsum(grown),
        block_bytes=block_bytes,
        num_returned=replay.num_returned,
    )


def timeline_on(
    device: Device, tape: Tape, settings: AllocatorSettings, *, watch: Watch | None = None
) -> MemoryTimeline:
    """Replays `tape` with the memory that `device` has besides the context, or without a limit where that is too little."""
    try:
        return replay_timeline(tape, settings, capacity_bytes=device.capacity_bytes - device.context_bytes, watch=watch)
    # A workload that does not fit still has a peak to report: how much memory it would need.
    except OutOfDeviceMemory:
        return replay_timeline(tape, settings, watch=watch)
