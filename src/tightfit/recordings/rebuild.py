"""Reconstructs the allocator's state at the begin of a recording from its end, by undoing the events from the last to the first.

This yields the segments of the start and the blocks that were allocated in them. The free blocks are the gaps in between, because free
neighbours are always merged. An event has the requested size of a block only, so the size of a block that was freed during the recording is
computed; a remainder too small to be split off by the large pool shows as a gap that no free block can have.
"""

import dataclasses
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable

from tightfit.allocator.caching import CachingAllocator
from tightfit.allocator.pools import SMALL_BYTES, SMALL_SEGMENT_BYTES, Block, ExpandableSegment, rounded
from tightfit.allocator.settings import AllocatorSettings
from tightfit.recordings.read import Action, DeviceRecording


@dataclasses.dataclass(slots=True, kw_only=True)
class _Held:
    """A block at the start: allocated, or waiting for another stream. `num_bytes` is None where it is not known yet."""

    address: int
    requested_bytes: int
    num_bytes: int | None
    is_live: bool


@dataclasses.dataclass(slots=True, kw_only=True)
class _Range:
    """A segment at the start, or a contiguous mapped range of an expandable one."""

    address: int
    end: int
    lane: int
    is_small: bool
    is_expandable: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The state at the start: the allocated blocks by address, and the segments (address and bytes)."""

    blocks: dict[int, Block]
    segments: tuple[tuple[int, int], ...]


def rebuild(recording: DeviceRecording, settings: AllocatorSettings, allocator: CachingAllocator) -> Start:
    """Puts a new `allocator` into the state at the start of `recording`, which ran with `settings`."""
    held = _held_at_start(recording)
    ranges = _ranges_at_start(recording)
    starts = [piece.address for piece in ranges]
    inside: dict[int, list[_Held]] = {piece.address: [] for piece in ranges}
    for block in sorted(held.values(), key=lambda block: block.address):
        at = bisect_right(starts, block.address) - 1
        # A block outside of all ranges belongs to a segment that the recording does not show; it cannot be placed.
        if at >= 0 and block.address < ranges[at].end:
            inside[ranges[at].address].append(block)
    tails = _next_starts(recording, sorted(held))
    spaces = _address_spaces(recording, ranges, settings, allocator)
    # torch has one expandable segment per stream and pool (as long as addresses last), whose mapped ranges are one chain of blocks.
    chains: dict[tuple[int, bool] | int, list[_Range]] = {}
    for piece in ranges:
        chains.setdefault((piece.lane, piece.is_small) if piece.is_expandable else piece.address, []).append(piece)
    blocks: dict[int, Block] = {}
    for key, pieces in chains.items():
        builder = _Builder(allocator, pieces[0], spaces[key] if isinstance(key, tuple) else None)
        for piece in pieces:
            builder.skip_to(piece.address)
            allocator.count_adopted(piece.end - piece.address, is_segment=not piece.is_expandable)
            for end, owner in _tiles(piece, inside[piece.address], settings, tails):
                block = builder.extend_to(end, owner)
                if owner is not None:
                    blocks[owner.address] = block
        # The rest of the reserved addresses is unmapped; the allocator grows into it.
        if builder.space is not None:
            builder.skip_to(builder.space.address + builder.space.num_bytes)
    allocator.reset_peaks()
    plain = [(piece.address, piece.end - piece.address) for piece in ranges if not piece.is_expandable]
    paged = [(space.address, space.num_bytes) for space in spaces.values()]
    return Start(blocks=blocks, segments=(*plain, *paged))


def _held_at_start(recording: DeviceRecording) -> dict[int, _Held]:
    held = {
        block.address: _Held(
            address=block.address,
            requested_bytes=block.requested_bytes,
            num_bytes=block.num_bytes,
            is_live=block.is_live,
        )
        for segment in recording.segments
        for block in segment.blocks
        if block.is_live or block.is_waiting
    }
    columns = (recording.action, recording.address, recording.num_bytes)
    for action, address, num_bytes in zip(*(column[::-1].tolist() for column in columns), strict=True):
        if action == Action.ALLOC:
            held.pop(address, None)
        elif action == Action.FREE_COMPLETED:
            # Backwards, a completed free brings the block back, first as one that waits; the free_requested before it makes it live.
            held[address] = _Held(address=address, requested_bytes=num_bytes, num_bytes=None, is_live=False)
        elif action == Action.FREE_REQUESTED and address in held:
            held[address].is_live = True
    return held


def _ranges_at_start(recording: DeviceRecording) -> list[_Range]:
    whole, paged = _Ranges(), _Ranges()
    for segment in recording.segments:
        (paged if segment.is_expandable else whole).add(
            _Range(
                address=segment.address,
                end=segment.address + segment.num_bytes,
                lane=segment.lane,
                is_small=segment.is_small,
                is_expandable=segment.is_expandable,
            )
        )
    small = _smallness(recording)
    columns = (recording.action, recording.address, recording.num_bytes, recording.lane)
    for action, address, num_bytes, lane in zip(*(column[::-1].tolist() for column in columns), strict=True):
        end = address + num_bytes
        if action == Action.SEGMENT_ALLOC:
            whole.discard(address)
        elif action == Action.SEGMENT_FREE:
            # A large segment is 20 MiB or more (get_allocation_size), so the size tells the pool of a segment that is gone.
            is_small = num_bytes == SMALL_SEGMENT_BYTES
            whole.add(_Range(address=address, end=end, lane=lane, is_small=is_small, is_expandable=False))
        elif action == Action.SEGMENT_MAP:
            paged.subtract(address, end)
        elif action == Action.SEGMENT_UNMAP:
            is_small = small.get(address, num_bytes == SMALL_SEGMENT_BYTES)
            paged.add(_Range(address=address, end=end, lane=lane, is_small=is_small, is_expandable=True))
    return _joined([*whole.by_address.values(), *paged.by_address.values()])


class _Ranges:
    """Ranges by address, none of which overlaps another in a consistent recording."""

    def __init__(self) -> None:
        self.by_address: dict[int, _Range] = {}
        self._starts: list[int] = []

    def add(self, piece: _Range) -> None:
        """Adds a range."""
        if piece.address not in self.by_address:
            insort(self._starts, piece.address)
        self.by_address[piece.address] = piece

    def discard(self, address: int) -> None:
        """Removes the range that begins here, if there is one."""
        if self.by_address.pop(address, None) is not None:
            del self._starts[bisect_left(self._starts, address)]

    def subtract(self, begin: int, end: int) -> None:
        """Cuts `[begin, end)` out of the ranges."""
        first = max(0, bisect_right(self._starts, begin) - 1)
        for address in self._starts[first : bisect_left(self._starts, end)]:
            piece = self.by_address[address]
            if piece.end > begin:
                self.discard(address)
                if piece.address < begin:
                    self.add(dataclasses.replace(piece, end=begin))
                if end < piece.end:
                    self.add(dataclasses.replace(piece, address=end))


def _smallness(recording: DeviceRecording) -> dict[int, bool]:
    """Whether each unmapped range belonged to a small pool, by the size of a block that was seen in it."""
    chosen = recording.action <= Action.FREE_COMPLETED
    seen = sorted(zip(recording.address[chosen].tolist(), recording.num_bytes[chosen].tolist(), strict=True))
    addresses = [address for address, _ in seen]
    small: dict[int, bool] = {}
    unmapped = recording.action == Action.SEGMENT_UNMAP
    for address, num_bytes in zip(
        recording.address[unmapped].tolist(), recording.num_bytes[unmapped].tolist(), strict=True
    ):
        at = bisect_right(addresses, address + num_bytes - 1) - 1
        if at >= 0 and addresses[at] >= address:
            small[address] = seen[at][1] <= SMALL_BYTES
    return small


def _joined(ranges: Iterable[_Range]) -> list[_Range]:
    """The ranges by address; adjacent ones of an expandable segment are merged, overlapping ones dropped."""
    result: list[_Range] = []
    for piece in sorted(ranges, key=lambda piece: piece.address):
        last = result[-1] if result else None
        if last is not None and piece.address < last.end:
            continue
        is_same_kind = (
            last is not None
            and last.is_expandable
            and piece.is_expandable
            and last.lane == piece.lane
            and last.is_small == piece.is_small
        )
        if last is not None and is_same_kind and last.end == piece.address:
            last.end = piece.end
        else:
            result.append(piece)
    return result


def _address_spaces(
    recording: DeviceRecording, ranges: list[_Range], settings: AllocatorSettings, allocator: CachingAllocator
) -> dict[tuple[int, bool], ExpandableSegment]:
    """The expandable segment of each pool, taken to begin at its lowest page that is mapped at the start or later."""
    lowest: dict[tuple[int, bool], int] = {}
    for piece in ranges:
        if piece.is_expandable:
            key = (piece.lane, piece.is_small)
            lowest[key] = min(lowest.get(key, piece.address), piece.address)
    spaces = {}
    mapped = _mapped_later(recording)
    for (lane, is_small), address in lowest.items():
        page = SMALL_SEGMENT_BYTES if is_small else settings.large_segment_size_bytes
        again = (
            other
            for other in mapped.get((lane, is_small), ())
            # Within reach and a whole number of pages away, or it belongs to another segment.
            if 0 < address - other < allocator.address_space_bytes and (address - other) % page == 0
        )
        begin = min(again, default=address)
        spaces[lane, is_small] = ExpandableSegment(begin, allocator.address_space_bytes, page)
    return spaces


def _mapped_later(recording: DeviceRecording) -> dict[tuple[int, bool], list[int]]:
    """The addresses at which pages were mapped for each pool."""
    found: dict[tuple[int, bool], list[int]] = {}
    pending: list[int] = []
    columns = (recording.action, recording.address, recording.num_bytes, recording.lane)
    for action, address, num_bytes, lane in zip(*(column.tolist() for column in columns), strict=True):
        if action == Action.SEGMENT_MAP:
            pending.append(address)
        # A map event has a stream but no pool; the allocation right after it, for which it was made, tells by its size.
        elif action == Action.ALLOC and pending:
            found.setdefault((lane, num_bytes <= SMALL_BYTES), []).extend(pending)
            pending.clear()
    return found


class _Builder:
    """Builds the chain of blocks of one segment, from its first address up."""

    def __init__(self, allocator: CachingAllocator, first: _Range, space: ExpandableSegment | None) -> None:
        self.allocator = allocator
        self.space = space
        self.pool = allocator.pools.of(first.lane, is_small=first.is_small)
        self.at = first.address if space is None else space.address
        self.last: Block | None = None

    def skip_to(self, end: int) -> None:
        """Adds an unmapped range up to `end`."""
        if end > self.at:
            self._adopt(Block(self.at, end - self.at, self.pool, self.space), is_mapped=False)

    def extend_to(self, end: int, owner: _Held | None) -> Block:
        """Adds the next block; it is free if it has no `owner`."""
        block = Block(self.at, end - self.at, self.pool, self.space)
        if owner is not None:
            block.is_live = owner.is_live
            block.requested_bytes = owner.requested_bytes
            # Some stream, which one is not recorded: the block waits until its free_completed event.
            block.uses = None if owner.is_live else {-1}
        self._adopt(block, is_mapped=True)
        return block

    def _adopt(self, block: Block, *, is_mapped: bool) -> None:
        block.is_mapped = is_mapped
        self.allocator.adopt(block, self.last)
        self.last = block
        self.at = block.address + block.size


def _next_starts(recording: DeviceRecording, held: list[int]) -> dict[int, int]:
    """For each block at the start, the lowest address behind it at which another was allocated in its lifetime: an upper bound of its end."""
    alive = set(held)
    lowest: dict[int, int] = {}
    for action, address in zip(recording.action.tolist(), recording.address.tolist(), strict=True):
        if action == Action.ALLOC:
            at = bisect_right(held, address) - 1
            if at >= 0 and held[at] in alive and held[at] < address:
                lowest[held[at]] = min(address, lowest.get(held[at], address))
        elif action == Action.FREE_COMPLETED:
            alive.discard(address)
    return lowest


def _tiles(
    piece: _Range, held: list[_Held], settings: AllocatorSettings, next_starts: dict[int, int]
) -> Iterable[tuple[int, _Held | None]]:
    """The blocks that fill a range: their ends and owners."""
    at = piece.address
    for position, block in enumerate(held):
        if block.address > at:
            yield block.address, None
        bound = held[position + 1].address if position + 1 < len(held) else piece.end
        end = min(bound, next_starts.get(block.address, bound))
        at = min(block.address + _block_bytes(block, end, piece, settings), bound)
        yield at, block
    if at < piece.end:
        yield piece.end, None


def _block_bytes(block: _Held, bound: int, piece: _Range, settings: AllocatorSettings) -> int:
    if block.num_bytes is not None:
        return block.num_bytes
    size = rounded(block.requested_bytes, settings.roundup_power2_divisions)
    if piece.is_small or piece.is_expandable:
        return size
    is_oversize = settings.max_split_size_bytes is not None and size >= settings.max_split_size_bytes
    rest_bytes = bound - block.address - size
    # should_split keeps a remainder of up to 1 MiB with the block, and never splits for an oversize request.
    return bound - block.address if is_oversize or rest_bytes <= SMALL_BYTES else size
