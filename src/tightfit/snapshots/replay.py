"""Replays a recording through the simulated allocator: with the settings it ran with, or to see what others would have done.

The program's calls decide alone: its requests and frees, and the moments when it (or the allocator, out of memory) gave the cache back,
which a recording shows only as freed segments. The segments that were recorded give the addresses of new ones, on which ties between
equally good blocks depend, and are then compared with what the simulation asked of the driver.
"""

import dataclasses
from bisect import bisect_right, insort
from collections.abc import Mapping
from typing import Any

from tightfit.errors import UsageError
from tightfit.simulate.allocator import CachingAllocator, OutOfDeviceMemory
from tightfit.simulate.blocks import Block
from tightfit.simulate.levels import Watch
from tightfit.simulate.settings import AllocatorSettings
from tightfit.snapshots.read import Action, DeviceRecording, Recording
from tightfit.snapshots.rebuild import rebuild
from tightfit.units import GIB

_SOME_OTHER_STREAM = -1 << 62
_GIVES = (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP)
_RETURNS = (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """Where a replay ran out of memory: the index of the event, what was asked for (rounded) and what was held then, in bytes."""

    event: int
    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    free_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What a replay found on one device.

    `segments` counts by size everything that was mapped from the driver during the recording. `agrees` says whether each driver call was
    the recorded one, to the byte and in order; `num_moved_blocks` counts the blocks that got another address than the recorded one.
    """

    device: int
    events: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    segments: Mapping[int, int]
    alloc_retries: int
    oom: OutOfMemory | None
    agrees: bool
    num_moved_blocks: int

    def to_json(self) -> dict[str, Any]:
        """The figures as `tightfit replay --json` prints them."""
        return {
            "schema": 1,
            "events": self.events,
            "peak_allocated_bytes": self.peak_allocated_bytes,
            "peak_reserved_bytes": self.peak_reserved_bytes,
            "segments": {str(size): count for size, count in self.segments.items()},
            "alloc_retries": self.alloc_retries,
            "oom": None if self.oom is None else dataclasses.asdict(self.oom),
        }


def replay(
    recording: Recording,
    *,
    settings: AllocatorSettings | None = None,
    capacity_bytes: int | None = None,
    device: int | None = None,
    watch: Watch | None = None,
) -> Replay:
    """Replays the events of one device, by default the one with most events.

    `settings` are those that were recorded unless given; what the cache held at the start stays as it was recorded. `capacity_bytes`
    bounds what the allocator may hold; without it there is no limit. A cache that is larger than that at the start is given back first.
    A request that failed in the recording is made again where anything is different, and given up at once if it succeeds. `watch` may look
    at the allocator after each event; its blocks are by the address that was recorded.

    Raises:
        UsageError: the recording has nothing of `device`.
    """
    found = [d for d in recording.devices if device in (None, d.device)]
    if not found:
        raise UsageError(f"{recording.path} has nothing of device {device}")
    chosen = max(found, key=lambda d: (d.num_events, len(d.segments), -d.device))
    return _Player(chosen, recording.settings, settings or recording.settings, capacity_bytes).play(watch)


class _Places:
    """Addresses for new segments: the recorded one where the recording has a segment of that size now, otherwise one that nothing has."""

    def __init__(self, recording: DeviceRecording) -> None:
        columns = (recording.address.tolist(), recording.num_bytes.tolist())
        ends = [segment.address + segment.num_bytes for segment in recording.segments]
        ends += [address + num_bytes for address, num_bytes in zip(*columns, strict=True)]
        self._fresh = (max(ends, default=0) // GIB + 2) * GIB
        self.announced: list[tuple[Action, int, int]] = []
        self.taken: list[tuple[int, int]] = []

    def take(self, address: int, num_bytes: int) -> None:
        """There is a segment here."""
        insort(self.taken, (address, address + num_bytes))

    def release(self, address: int, num_bytes: int) -> None:
        """It is gone."""
        self.taken.remove((address, address + num_bytes))

    def place(self, num_bytes: int, *, is_expandable: bool) -> int:
        """The address of a new segment of `num_bytes`."""
        for at, (action, address, announced_bytes) in enumerate(self.announced):
            if is_expandable:
                fits = action == Action.SEGMENT_MAP
            else:
                fits = announced_bytes == num_bytes and self._is_clear(address, address + num_bytes)
            if fits:
                del self.announced[at]
                self.take(address, num_bytes)
                return address
        address = self._fresh
        self._fresh += -(-num_bytes // GIB) * GIB + GIB
        self.take(address, num_bytes)
        return address

    def _is_clear(self, begin: int, end: int) -> bool:
        at = bisect_right(self.taken, (begin, end))
        is_before_next = at == len(self.taken) or self.taken[at][0] >= end
        return is_before_next and (at == 0 or self.taken[at - 1][1] <= begin)


class _Player:
    """One replay on its way: `blocks` are those in use, by the address that the recording gave them."""

    def __init__(
        self,
        recording: DeviceRecording,
        recorded_settings: AllocatorSettings,
        settings: AllocatorSettings,
        capacity_bytes: int | None,
    ) -> None:
        self.recording = recording
        self.places = _Places(recording)
        self.is_expandable = settings.expandable_segments
        self.is_hypothetical = capacity_bytes is not None or settings != recorded_settings
        self.allocator = CachingAllocator(
            settings,
            capacity_bytes=capacity_bytes,
            total_bytes=capacity_bytes,
            place_segment=self._place,
        )
        start = rebuild(recording, recorded_settings, self.allocator)
        self.blocks: dict[int, Block] = start.blocks
        for address, num_bytes in start.segments:
            self.places.take(address, num_bytes)
        self.log = self.allocator.driver_log = []
        limit_bytes = self.allocator.capacity_bytes
        if limit_bytes is not None and self.allocator.reserved_bytes > limit_bytes:
            self.allocator.empty_cache()
            self.allocator.reset_peaks()
        self.num_log_seen = 0
        self.num_moved_blocks = 0
        self.recorded_calls: list[tuple[str, int, int]] = []

    def play(self, watch: Watch | None = None) -> Replay:
        """Replays every event, up to the first that finds no memory."""
        recording = self.recording
        columns = (recording.action, recording.address, recording.num_bytes, recording.lane)
        actions, addresses, sizes, lanes = (column.tolist() for column in columns)
        oom = self._too_little_to_begin()
        was_returning = False
        if watch is not None:
            watch(-1, self.allocator, self.blocks)
        for at, (action, address, num_bytes, lane) in enumerate(zip(actions, addresses, sizes, lanes, strict=True)):
            if oom is not None:
                break
            is_returning = action in _RETURNS
            if action == Action.ALLOC or (action == Action.OOM and self.is_hypothetical):
                try:
                    self._malloc(address, num_bytes, lane, was_served=action == Action.ALLOC)
                except OutOfDeviceMemory as error:
                    oom = _out_of_memory(at, error)
            elif action == Action.FREE_REQUESTED:
                following = (actions[at + 1], addresses[at + 1]) if at + 1 < len(actions) else None
                self._free(address, waits=following != (Action.FREE_COMPLETED, address))
            elif action == Action.FREE_COMPLETED:
                self._complete(address)
            elif action in _GIVES:
                self.places.announced.append((Action(action), address, num_bytes))
                self.recorded_calls.append((Action(action).name.lower(), address, num_bytes))
            elif is_returning:
                if not was_returning:
                    self.allocator.empty_cache()
                self.recorded_calls.append((Action(action).name.lower(), address, num_bytes))
            was_returning = is_returning
            if watch is not None:
                watch(at, self.allocator, self.blocks)
        return self._result(oom)

    def _too_little_to_begin(self) -> OutOfMemory | None:
        """What lives at the start may be more than the limit already."""
        allocator = self.allocator
        if allocator.capacity_bytes is None or allocator.reserved_bytes <= allocator.capacity_bytes:
            return None
        return OutOfMemory(
            event=0,
            requested_bytes=0,
            allocated_bytes=allocator.allocated_bytes,
            reserved_bytes=allocator.reserved_bytes,
            free_bytes=0,
        )

    def _malloc(self, address: int, num_bytes: int, lane: int, *, was_served: bool) -> None:
        block = self.allocator.malloc(num_bytes, lane)
        self.places.announced.clear()
        if was_served:
            self.num_moved_blocks += block.address != address
            self.blocks[address] = block
        else:
            self.allocator.free(block)

    def _free(self, address: int, *, waits: bool) -> None:
        block = self.blocks.get(address)
        if block is None or not block.is_live:
            return
        if waits:
            self.allocator.record_stream(block, _SOME_OTHER_STREAM)
        else:
            del self.blocks[address]
        self.allocator.free(block)

    def _complete(self, address: int) -> None:
        block = self.blocks.get(address)
        if block is not None and not block.is_live:
            del self.blocks[address]
            self.allocator.complete(block)

    def _place(self, num_bytes: int, _lane: int) -> int:
        for action, address, freed_bytes in self.log[self.num_log_seen :]:
            if action == "segment_free":
                self.places.release(address, freed_bytes)
        self.num_log_seen = len(self.log)
        return self.places.place(num_bytes, is_expandable=self.is_expandable)

    def _result(self, oom: OutOfMemory | None) -> Replay:
        allocator = self.allocator
        return Replay(
            device=self.recording.device,
            events=self.recording.num_events,
            peak_allocated_bytes=allocator.peak_allocated_bytes,
            peak_reserved_bytes=allocator.peak_reserved_bytes,
            segments=dict(sorted(allocator.segments.items())),
            alloc_retries=allocator.num_alloc_retries,
            oom=oom,
            agrees=oom is None and self.log == self.recorded_calls,
            num_moved_blocks=self.num_moved_blocks,
        )


def _out_of_memory(event: int, error: OutOfDeviceMemory) -> OutOfMemory:
    return OutOfMemory(
        event=event,
        requested_bytes=error.requested_bytes,
        allocated_bytes=error.allocated_bytes,
        reserved_bytes=error.reserved_bytes,
        free_bytes=error.free_bytes,
    )
