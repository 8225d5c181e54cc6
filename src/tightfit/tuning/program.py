"""The allocator calls of a recorded program, without the addresses it got: replayed under any settings, always from the same start.

Settings apply from the first allocation of a process on, so a cache that other settings filled would be no fair start. Every trial begins with an
empty allocator that allocates the blocks which were allocated when the recording began, in the order of their addresses. Calls of `empty_cache`
stay where they were recorded, whichever settings are tried.
"""

import dataclasses
import enum
import random
from collections.abc import Callable, Mapping, Sequence

from tightfit.allocator.caching import CachingAllocator, OutOfDeviceMemory
from tightfit.allocator.pools import SMALL_BYTES, Block, rounded
from tightfit.allocator.settings import AllocatorSettings
from tightfit.recordings.read import Action, DeviceRecording
from tightfit.recordings.rebuild import rebuild
from tightfit.units import GIB

# No recording has this stream: real ones are at least 0, and those of private pools count down from -1.
_SOME_OTHER_STREAM = -1 << 62
_RETURNS = (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP)
# A check at every step would cost more than the step.
_EVENTS_BETWEEN_CHECKS = 2048
_SIZE_CHANGE = 0.2
_HIGHEST_ADDRESS = 1 << 62


class Step(enum.IntEnum):
    """A step of a program: TRY is an allocation that failed in the recording, FREE_LATER a free that waits for another stream until COMPLETE."""

    MALLOC = 0
    FREE = 1
    FREE_LATER = 2
    COMPLETE = 3
    TRY = 4
    EMPTY_CACHE = 5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lifetime:
    """A block from its allocation at step `lower` until just before step `upper`, when it can be reused; `is_whole`: allocated throughout."""

    lower: int
    upper: int
    num_bytes: int
    lane: int
    is_whole: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The result of one set of settings.

    `num_driver_calls` counts segments and pages allocated and freed after the start. `oom_event` is the recorded event at which memory ran out.
    `is_cut`: stopped because it reserved too much already, so that the true peak may be higher.
    """

    peak_reserved_bytes: int
    num_driver_calls: int
    alloc_retries: int
    oom_event: int | None
    is_cut: bool

    @classmethod
    def sum_of(cls, trials: Sequence["Trial"]) -> "Trial":
        """The sum over several devices, with the `oom_event` of the first that ran out of memory."""
        return cls(
            peak_reserved_bytes=sum(one.peak_reserved_bytes for one in trials),
            num_driver_calls=sum(one.num_driver_calls for one in trials),
            alloc_retries=sum(one.alloc_retries for one in trials),
            oom_event=next((one.oom_event for one in trials if one.oom_event is not None), None),
            is_cut=any(one.is_cut for one in trials),
        )

    @property
    def is_calm(self) -> bool:
        """Whether the program ran to its end without an allocation retry."""
        return self.oom_event is None and not self.is_cut and not self.alloc_retries

    @property
    def badness(self) -> tuple[bool, bool, int, int, int]:
        """A sort key, smaller is better: it fits, it was not cut, few retries, few bytes, few driver calls."""
        return (
            self.oom_event is not None,
            self.is_cut,
            self.alloc_retries,
            self.peak_reserved_bytes,
            self.num_driver_calls,
        )

    def is_no_worse(self, other: "Trial") -> bool:
        """Whether it fits if the other does, with fewer retries, or as many and no more bytes."""
        if self.oom_event is not None or other.oom_event is not None:
            return self.oom_event is None
        return (self.alloc_retries, self.peak_reserved_bytes) <= (other.alloc_retries, other.peak_reserved_bytes)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The steps of one device, as columns of equal length: the `Step`, the block, its requested bytes, its lane, and the recorded event.

    The first `num_at_start` steps allocate the blocks of the start.
    """

    device: int
    num_at_start: int
    steps: Sequence[int]
    blocks: Sequence[int]
    num_bytes: Sequence[int]
    lanes: Sequence[int]
    events: Sequence[int]

    @classmethod
    def of(cls, recording: DeviceRecording, recorded_settings: AllocatorSettings) -> "Program":
        """The program behind a recording that ran with `recorded_settings`."""
        writer = _Writer()
        start = rebuild(recording, recorded_settings, CachingAllocator(recorded_settings)).blocks
        # In the order of addresses, so that neighbours are likely to be neighbours again.
        for address in sorted(start):
            block = start[address]
            writer.malloc(address, block.requested_bytes, block.pool.stream, event=0)
            if not block.is_live:
                writer.free(address, waits=True, event=0)
        num_at_start = len(writer.rows)
        writer.follow(recording)
        columns = zip(*writer.rows, strict=True) if writer.rows else ((),) * 5
        steps, blocks, num_bytes, lanes, events = (tuple(column) for column in columns)
        return cls(
            device=recording.device,
            num_at_start=num_at_start,
            steps=steps,
            blocks=blocks,
            num_bytes=num_bytes,
            lanes=lanes,
            events=events,
        )

    def play(
        self,
        settings: AllocatorSettings,
        *,
        capacity_bytes: int | None = None,
        cut_above_bytes: int | None = None,
        places_downwards: bool = False,
    ) -> Trial:
        """The trial of `settings` with a limit of `capacity_bytes`, stopped once it reserves more than `cut_above_bytes`.

        The driver's addresses break ties between equal free blocks; here each new segment lies above all others, or below them.
        """
        allocator = CachingAllocator(
            settings,
            capacity_bytes=capacity_bytes,
            total_bytes=capacity_bytes,
            place_segment=_downwards() if places_downwards else None,
        )
        live: dict[int, Block] = {}
        waits: dict[int, set[int] | None] = {}
        oom_event, is_cut = self._run(allocator, live, waits, 0, self.num_at_start), False
        # Only from here on: filling the allocator with the blocks of the start costs calls that no setting can avoid.
        allocator.driver_log = []
        for begin in range(self.num_at_start, len(self.steps), _EVENTS_BETWEEN_CHECKS):
            is_cut = cut_above_bytes is not None and allocator.peak_reserved_bytes > cut_above_bytes
            if is_cut or oom_event is not None:
                break
            end = min(begin + _EVENTS_BETWEEN_CHECKS, len(self.steps))
            oom_event = self._run(allocator, live, waits, begin, end)
        return Trial(
            peak_reserved_bytes=allocator.peak_reserved_bytes,
            num_driver_calls=len(allocator.driver_log),
            alloc_retries=allocator.num_alloc_retries,
            oom_event=oom_event,
            is_cut=is_cut,
        )

    def _run(
        self,
        allocator: CachingAllocator,
        live: dict[int, Block],
        waits: dict[int, set[int] | None],
        begin: int,
        end: int,
    ) -> int | None:
        """Replays the steps `[begin, end)`; returns the event at which memory ran out, if it did."""
        columns = (self.steps, self.blocks, self.num_bytes, self.lanes)
        rows = zip(*(column[begin:end] for column in columns), strict=True)
        for at, (step, block, num_bytes, lane) in enumerate(rows, begin):
            # Ordered by frequency: a trial is some hundred thousand steps, and there are dozens of trials.
            if step == Step.FREE:
                allocator.free(live.pop(block))
            elif step in (Step.MALLOC, Step.TRY):
                try:
                    found = allocator.malloc(num_bytes, lane)
                except OutOfDeviceMemory:
                    return self.events[at]
                if step == Step.MALLOC:
                    live[block] = found
                else:
                    allocator.free(found)
            elif step == Step.FREE_LATER:
                live[block].record_stream(_SOME_OTHER_STREAM)
                waits[block] = live[block].uses
                allocator.free(live[block])
            elif step == Step.COMPLETE:
                allocator.complete(live.pop(block), waits.pop(block))
            else:
                allocator.empty_cache()
        return None

    def with_other_sizes(self, seed: int) -> "Program":
        """The same program on other data: each size above 1 MiB is scaled by up to a fifth, equal sizes by the same factor."""
        source = random.Random(seed)
        # Another batch or sequence length scales sizes like this; what was fitted to exact sizes shows itself here.
        factors = {
            size: 1 + source.uniform(-_SIZE_CHANGE, _SIZE_CHANGE)
            for size in sorted(set(self.num_bytes))
            # Small requests share 2 MiB segments in any case; weights of a layer must stay equal to their gradients.
            if size > SMALL_BYTES
        }
        return dataclasses.replace(self, num_bytes=tuple(int(size * factors.get(size, 1)) for size in self.num_bytes))

    def peak_live_bytes(self) -> int:
        """The peak of allocated bytes, each request rounded up to 512 bytes: a lower bound for any allocator.

        A block that waits for another stream is not counted: torch synchronises with the stream when memory runs out.
        """
        live_bytes = peak_bytes = 0
        sizes: dict[int, int] = {}
        for step, block, num_bytes in zip(self.steps, self.blocks, self.num_bytes, strict=True):
            if step == Step.MALLOC:
                sizes[block] = rounded(num_bytes, (0,))
                live_bytes += sizes[block]
            elif step in (Step.FREE, Step.FREE_LATER):
                live_bytes -= sizes[block]
            extra_bytes = rounded(num_bytes, (0,)) if step == Step.TRY else 0
            peak_bytes = max(peak_bytes, live_bytes + extra_bytes)
        return peak_bytes

    def lifetimes(self) -> list[Lifetime]:
        """Every block with the steps between which its bytes are occupied, each size rounded up to 512 bytes."""
        allocated_at: dict[int, tuple[int, int, int]] = {}
        waiting: set[int] = set()
        found: list[Lifetime] = []

        def die(block: int, upper: int) -> None:
            lower, num_bytes, lane = allocated_at.pop(block)
            # Parameters and optimizer states, mostly.
            is_whole = lower < self.num_at_start and upper >= len(self.steps)
            size = rounded(num_bytes, (0,))
            found.append(Lifetime(lower=lower, upper=upper, num_bytes=size, lane=lane, is_whole=is_whole))

        rows = zip(self.steps, self.blocks, self.num_bytes, self.lanes, strict=True)
        for at, (step, block, num_bytes, lane) in enumerate(rows):
            if step in (Step.MALLOC, Step.TRY):
                allocated_at[block] = (at, num_bytes, lane)
            if step == Step.FREE_LATER:
                waiting.add(block)
            elif step == Step.FREE or (step == Step.COMPLETE and block in waiting):
                waiting.discard(block)
                die(block, at)
            elif step == Step.TRY:
                die(block, at + 1)
            elif step == Step.EMPTY_CACHE:
                # empty_cache synchronises all streams first, so pending frees complete.
                for freed in sorted(waiting):
                    die(freed, at)
                waiting.clear()
        for block in sorted(allocated_at):
            die(block, len(self.steps))
        return found

    def requests_by_size(self) -> Mapping[int, int]:
        """How often each size was requested, in bytes before rounding."""
        counts: dict[int, int] = {}
        for step, num_bytes in zip(self.steps, self.num_bytes, strict=True):
            if step == Step.MALLOC:
                counts[num_bytes] = counts.get(num_bytes, 0) + 1
        return counts


def _downwards() -> Callable[[int, int], int]:
    """Addresses for segments, each below all earlier ones."""
    lowest = _HIGHEST_ADDRESS

    def place(num_bytes: int, _lane: int) -> int:
        nonlocal lowest
        lowest -= -(-num_bytes // GIB) * GIB + GIB
        return lowest

    return place


class _Writer:
    """Writes the rows of a program, in which a block has a number of its own instead of an address."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, int, int, int]] = []
        self.in_use: dict[int, int] = {}
        self.waiting: dict[int, int] = {}
        self.num_blocks = 0

    def malloc(self, address: int, num_bytes: int, lane: int, *, event: int) -> None:
        """Adds an allocation at `address`."""
        self.in_use[address] = self._new(Step.MALLOC, num_bytes, lane, event)

    def free(self, address: int, *, waits: bool, event: int) -> None:
        """Adds the free of the block at `address`, if it is known."""
        block = self.in_use.pop(address, None)
        if block is None:
            return
        if waits:
            self.waiting[address] = block
        self.rows.append((Step.FREE_LATER if waits else Step.FREE, block, 0, 0, event))

    def follow(self, recording: DeviceRecording) -> None:
        """Adds the program's part of the events of a recording."""
        columns = (recording.action, recording.address, recording.num_bytes, recording.lane)
        actions, addresses, sizes, lanes = (column.tolist() for column in columns)
        was_returning = False
        for at, (action, address, num_bytes, lane) in enumerate(zip(actions, addresses, sizes, lanes, strict=True)):
            if action == Action.ALLOC:
                self.malloc(address, num_bytes, lane, event=at)
            elif action == Action.FREE_REQUESTED:
                following = (actions[at + 1], addresses[at + 1]) if at + 1 < len(actions) else None
                # torch completes a free at once unless another stream has used the block.
                self.free(address, waits=following != (Action.FREE_COMPLETED, address), event=at)
            elif action == Action.FREE_COMPLETED:
                block = self.waiting.pop(address, None)
                if block is not None:
                    self.rows.append((Step.COMPLETE, block, 0, 0, at))
            elif action == Action.OOM:
                self._new(Step.TRY, num_bytes, lane, at)
            # A run of freed segments is one call of empty_cache.
            elif action in _RETURNS and not was_returning:
                self.rows.append((Step.EMPTY_CACHE, 0, 0, 0, at))
            was_returning = action in _RETURNS

    def _new(self, step: Step, num_bytes: int, lane: int, event: int) -> int:
        block, self.num_blocks = self.num_blocks, self.num_blocks + 1
        self.rows.append((step, block, num_bytes, lane, event))
        return block
