"""Replays a recording through the simulated allocator, with the settings it ran with or with others.

Only the program's calls are replayed: its allocations and frees, and its calls of `empty_cache`, which a recording shows only as freed segments.
What the allocator freed by itself, to serve a request, is taken from the recording only where nothing is different. The recorded segments give
the addresses of new ones, on which ties between equally good blocks depend, and are then compared with the simulated driver calls.
"""

import dataclasses
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tightfit.allocator.caching import CachingAllocator, OutOfDeviceMemory
from tightfit.allocator.expandable import whole_pages
from tightfit.allocator.pools import Block
from tightfit.allocator.settings import AllocatorSettings
from tightfit.errors import UsageError
from tightfit.recordings.marks import Marks
from tightfit.recordings.read import Action, DeviceRecording, Recording
from tightfit.recordings.rebuild import rebuild
from tightfit.recordings.returns import Return, returns_of
from tightfit.simulate.timeline_bytes import Watch
from tightfit.units import GIB, to_bytes

# No recording has this stream: real ones are at least 0, and those of private pools count down from -1.
_SOME_OTHER_STREAM = -1 << 62
_GIVES = (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP)
_EVENTS_BETWEEN_REPORTS = 1 << 14


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """Where a replay ran out of memory: the index of the event, the rounded request, and allocated, reserved and free bytes then."""

    event: int
    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    free_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The result of a replay on one device.

    `segments` counts by size every segment allocated during the recording. `agrees` says whether the driver calls were the recorded ones, to the
    byte and in order; `num_moved_blocks` counts the blocks that got another address than the recorded one.
    """

    device: int | None
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
    progress: Callable[[str, float], None] | None = None,
) -> Replay:
    """Replays the events of one device, by default the one with most events.

    `settings` are those that were recorded unless given; the cache at the start stays as it was recorded. `capacity_bytes` limits reserved
    bytes; without it there is no limit. A cache that exceeds the limit at the start is freed first. An allocation that failed in the recording is
    tried again where anything is different, and freed at once if it succeeds; where nothing is, the first such one is the result's `oom`, and the
    rest is replayed all the same. `watch` is called after each event with the allocator and the blocks by recorded address. `progress` is called
    now and then with what is done and its share, from 0 to 1.

    Raises:
        UsageError: the recording does not have `device`.
    """
    found = [d for d in recording.devices if device in (None, d.device)]
    if not found:
        raise UsageError(f"{recording.path} has nothing of device {device}")
    # Most recordings have one busy device; the others hold a context and nothing else.
    chosen = max(found, key=lambda d: (d.num_events, len(d.segments), -d.device))
    return _Player(chosen, recording.settings, settings or recording.settings, capacity_bytes).play(watch, progress)


def together(each: Sequence[Replay]) -> Replay:
    """The sums over several devices, with the `oom` of the first that ran out of memory. `device` is None if there are several."""
    if len(each) == 1:
        return each[0]
    segments: Counter[int] = Counter()
    for one in each:
        segments.update(one.segments)
    return Replay(
        device=None,
        events=sum(one.events for one in each),
        peak_allocated_bytes=sum(one.peak_allocated_bytes for one in each),
        peak_reserved_bytes=sum(one.peak_reserved_bytes for one in each),
        segments=dict(sorted(segments.items())),
        alloc_retries=sum(one.alloc_retries for one in each),
        oom=next((one.oom for one in each if one.oom is not None), None),
        agrees=all(one.agrees for one in each),
        num_moved_blocks=sum(one.num_moved_blocks for one in each),
    )


def limit_of(recording: Recording, memory: str | int | None, name: str) -> int | None:
    """The bytes of `memory`, what the allocator may hold: a size, or a share of the recorded GPU's capacity; None is no limit.

    Raises:
        UsageError: it is no size, or a share and the recording does not say the capacity. `name` is what the caller calls it.
    """
    if memory is None:
        return None
    is_share = isinstance(memory, str) and memory.strip().endswith("%")
    if not is_share:
        return to_bytes(memory, name)
    capacity_bytes = None if recording.extra is None else Marks.from_plain(recording.extra).capacity_bytes
    if capacity_bytes is None:
        raise UsageError(f"{name} {memory}: this recording does not say the GPU's capacity; give a size, such as 22GiB")
    return to_bytes(memory, name, whole_bytes=capacity_bytes)


def devices_of(recording: Recording, device: int | None) -> list[int]:
    """The devices to replay: `device`, or else all that have events, or the first where none has any.

    Raises:
        UsageError: the recording does not have `device`.
    """
    there = [one.device for one in recording.devices]
    if device is not None:
        if device not in there:
            raise UsageError(
                f"{recording.path} has nothing of device {device}; it has {', '.join(map(str, there)) or 'none'}"
            )
        return [device]
    return [one.device for one in recording.busy]


class _Places:
    """Addresses for new segments: the recorded one where the recording has a segment of that size now, otherwise an unused one."""

    def __init__(self, recording: DeviceRecording) -> None:
        columns = (recording.address.tolist(), recording.num_bytes.tolist())
        ends = [segment.address + segment.num_bytes for segment in recording.segments]
        ends += [address + num_bytes for address, num_bytes in zip(*columns, strict=True)]
        # Above everything that the recording names, so that a new segment never overlaps a recorded one.
        self._fresh = (max(ends, default=0) // GIB + 2) * GIB
        self.announced: list[tuple[Action, int, int]] = []
        self.taken: list[tuple[int, int]] = []

    def take(self, address: int, num_bytes: int) -> None:
        """Marks the range of a segment as used."""
        insort(self.taken, (address, address + num_bytes))

    def release(self, address: int, num_bytes: int) -> None:
        """Marks the range of a segment as unused."""
        self.taken.remove((address, address + num_bytes))

    def place(self, num_bytes: int, *, is_expandable: bool) -> int:
        """The address of a new segment of `num_bytes`."""
        # The events of a request's new segments come before its alloc event, so they are known when the simulation asks.
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
    """The state of a replay: `blocks` are the allocated ones, by their recorded address."""

    def __init__(
        self,
        recording: DeviceRecording,
        recorded_settings: AllocatorSettings,
        settings: AllocatorSettings,
        capacity_bytes: int | None,
    ) -> None:
        self.recording = recording
        self.recorded_settings = recorded_settings
        self.oom: OutOfMemory | None = None
        self.retried_for = -1
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
        self.waits = {address: block.uses for address, block in start.blocks.items() if not block.is_live}
        for address, num_bytes in start.segments:
            self.places.take(address, num_bytes)
        self.log = self.allocator.driver_log = []
        limit_bytes = self.allocator.capacity_bytes
        # A cache of the recorded GPU can be larger than the GPU that is asked about.
        if limit_bytes is not None and self.allocator.reserved_bytes > limit_bytes:
            self.allocator.empty_cache()
            self.allocator.reset_peaks()
        self.num_log_seen = 0
        self.num_moved_blocks = 0
        self.recorded_calls: list[tuple[str, int, int]] = []

    def play(self, watch: Watch | None, progress: Callable[[str, float], None] | None) -> Replay:
        """Replays every event up to the first out-of-memory error; with unchanged settings and limits, past recorded ones."""
        recording = self.recording
        columns = (recording.action, recording.address, recording.num_bytes, recording.lane)
        actions, addresses, sizes, lanes = (column.tolist() for column in columns)
        self.oom = self._too_little_to_begin()
        has_failed = self.oom is not None
        returns = {one.begin: one for one in returns_of(recording, self.recorded_settings)}
        if watch is not None:
            watch(-1, self.allocator, self.blocks)
        for at, (action, address, num_bytes, lane) in enumerate(zip(actions, addresses, sizes, lanes, strict=True)):
            if has_failed:
                break
            # With other settings or more memory a request that failed may succeed; the recorded program would have gone on otherwise, so it
            # is freed again at once.
            if action == Action.ALLOC or (action == Action.OOM and self.is_hypothetical):
                has_failed = not self._malloc(at, address, num_bytes, lane, was_served=action == Action.ALLOC)
            elif action == Action.FREE_REQUESTED:
                # torch writes free_completed right behind free_requested unless the block waits for other streams.
                following = (actions[at + 1], addresses[at + 1]) if at + 1 < len(actions) else None
                self._free(address, waits=following != (Action.FREE_COMPLETED, address))
            elif action == Action.FREE_COMPLETED:
                self._complete(address)
            elif action in _GIVES:
                self.places.announced.append((Action(action), address, num_bytes))
                self.recorded_calls.append((Action(action).name.lower(), address, num_bytes))
            elif action == Action.OOM:
                self._note_recorded_failure(at, num_bytes)
            elif at in returns:
                self._return(returns[at])
            if watch is not None:
                watch(at, self.allocator, self.blocks)
            if progress is not None and not at % _EVENTS_BETWEEN_REPORTS:
                progress("replaying", at / len(actions))
        return self._result()

    def _too_little_to_begin(self) -> OutOfMemory | None:
        """The error for a start whose allocated blocks exceed the limit already, if they do."""
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

    def _malloc(self, event: int, address: int, num_bytes: int, lane: int, *, was_served: bool) -> bool:
        try:
            block = self.allocator.malloc(num_bytes, lane)
        except OutOfDeviceMemory as error:
            self.oom = OutOfMemory(
                event=event,
                requested_bytes=error.requested_bytes,
                allocated_bytes=error.allocated_bytes,
                reserved_bytes=error.reserved_bytes,
                free_bytes=error.free_bytes,
            )
            return False
        self.places.announced.clear()
        if was_served:
            self.num_moved_blocks += block.address != address
            self.blocks[address] = block
        else:
            self.allocator.free(block)
        return True

    def _note_recorded_failure(self, event: int, num_bytes: int) -> None:
        """Notes that an allocation failed in the recording, after its retry."""
        allocator = self.allocator
        self.places.announced.clear()
        # torch retries once before it raises; a return of the whole cache for this request has counted that retry.
        allocator.num_alloc_retries += event != self.retried_for
        if self.oom is None:
            self.oom = OutOfMemory(
                event=event,
                requested_bytes=num_bytes,
                allocated_bytes=allocator.allocated_bytes,
                reserved_bytes=allocator.reserved_bytes,
                free_bytes=self.recording.free_bytes_at_oom.get(event, 0),
            )

    def _return(self, returned: Return) -> None:
        """Replays segments that were freed to the driver."""
        allocator, columns = self.allocator, self.recording
        rows = range(returned.begin, returned.end)
        calls = [
            (Action(columns.action[at]).name.lower(), int(columns.address[at]), int(columns.num_bytes[at]))
            for at in rows
        ]
        self.recorded_calls += calls
        lanes = set(columns.lane[returned.begin : returned.end].tolist())
        if self.is_hypothetical:
            # With other settings the allocator decides for itself when to free; only the program's empty_cache is the same.
            if not returned.is_by_request:
                self._empty_cache(lanes)
            return
        wanted = set(calls)
        releasable = {_driver_call(block): block for block in allocator.pools.free_blocks()}
        given_by_all = {call for call, block in releasable.items() if call is not None and block.pool.stream >= 0}
        # Either the whole cache was freed, or the recording and the simulation have diverged and the whole cache is the best guess.
        if wanted == given_by_all or not wanted <= set(releasable):
            self._empty_cache(lanes)
            if returned.is_by_request:
                allocator.num_alloc_retries += 1
                self.retried_for = returned.end
            return
        for call in calls:
            allocator.driver.give_back(releasable[call])

    def _empty_cache(self, lanes: set[int]) -> None:
        """Frees the shared cache and that of private pools in `lanes`; if all `lanes` are private, only theirs."""
        if not lanes or max(lanes) >= 0:
            self.allocator.empty_cache()
        for block in self.allocator.pools.free_blocks():
            if block.pool.stream < 0 and block.pool.stream in lanes:
                self.allocator.driver.give_back(block)

    def _free(self, address: int, *, waits: bool) -> None:
        block = self.blocks.get(address)
        if block is None or not block.is_live:
            return
        if waits:
            block.record_stream(_SOME_OTHER_STREAM)
            self.waits[address] = block.uses
        else:
            del self.blocks[address]
        self.allocator.free(block)

    def _complete(self, address: int) -> None:
        # An emptied cache may have completed it before, and the block may be another's by now.
        if address in self.waits:
            self.allocator.complete(self.blocks.pop(address), self.waits.pop(address))

    def _place(self, num_bytes: int, _lane: int) -> int:
        for action, address, freed_bytes in self.log[self.num_log_seen :]:
            if action == "segment_free":
                self.places.release(address, freed_bytes)
        self.num_log_seen = len(self.log)
        return self.places.place(num_bytes, is_expandable=self.is_expandable)

    def _result(self) -> Replay:
        allocator = self.allocator
        return Replay(
            device=self.recording.device,
            events=self.recording.num_events,
            peak_allocated_bytes=allocator.peak_allocated_bytes,
            peak_reserved_bytes=allocator.peak_reserved_bytes,
            segments=dict(sorted(allocator.segments.items())),
            alloc_retries=allocator.num_alloc_retries,
            oom=self.oom,
            agrees=self.log == self.recorded_calls,
            num_moved_blocks=self.num_moved_blocks,
        )


def _driver_call(block: Block) -> tuple[str, int, int] | None:
    """The driver call that frees a block; None if it is no whole segment or page."""
    if block.segment is not None:
        begin, end = whole_pages(block)
        return ("segment_unmap", begin, end - begin) if begin < end else None
    return None if block.prev is not None or block.next is not None else ("segment_free", block.address, block.size)
