"""Blocks of device memory, the pools that hold the free ones, and the sizes that torch's caching allocator rounds to.

The constants and rules are those of torch 2.13: c10/core/AllocatorConfig.h and c10/cuda/CUDACachingAllocator.cpp, whose names stand
beside them. A pool keeps its free blocks ordered by size, then address, as plain integers, so that best fit is one bisection.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence

from tightfit.allocator.settings import AllocatorSettings

MIN_BLOCK_BYTES = 512
"""kMinBlockSize: every request is rounded up to a multiple of it."""
SMALL_BYTES = 1 << 20
"""kSmallSize: rounded requests up to here come from the small pool."""
SMALL_SEGMENT_BYTES = 2 << 20
"""kSmallBuffer: the segments (or expandable pages) of the small pool."""
MIN_LARGE_BYTES = 10 << 20
"""kMinLargeAlloc: from here on a request gets a segment of its own."""
LARGE_ROUNDING_BYTES = 2 << 20
"""kRoundLarge: what such a segment is rounded up to."""

# A key is size << 64 | address: one integer compares like the pair that torch's std::set orders by, at a fraction of the cost.
ADDRESS_BITS = 64
_FIRST_INTERVAL_BITS = SMALL_BYTES.bit_length()


def rounded(num_bytes: int, divisions: Sequence[int]) -> int:
    """The size of the block for a request of `num_bytes` (round_size); `divisions` is `AllocatorSettings.roundup_power2_divisions`."""
    if num_bytes < MIN_BLOCK_BYTES:
        return MIN_BLOCK_BYTES
    # One entry per power of two from 1 MiB on; smaller requests use the first, larger than 32 GiB the last.
    interval = min(max(num_bytes.bit_length() - _FIRST_INTERVAL_BITS, 0), len(divisions) - 1)
    count = divisions[interval]
    # roundup_power2_next_division, which torch skips for requests so small that a division would be below 512 bytes.
    if count > 1 and num_bytes > MIN_BLOCK_BYTES * count:
        step = (1 << (num_bytes.bit_length() - 1)) // count
        return -(-num_bytes // step) * step
    return -(-num_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES


def segment_bytes(size: int, large_segment_bytes: int) -> int:
    """The size of the segment that is asked of the driver for a block of `size` bytes (get_allocation_size)."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    # Requests between 1 and 10 MiB split a shared segment, to reduce fragmentation (the comment at the head of torch's file).
    if size < MIN_LARGE_BYTES:
        return large_segment_bytes
    return -(-size // LARGE_ROUNDING_BYTES) * LARGE_ROUNDING_BYTES


class ExpandableSegment:
    """A reserved range of addresses of which whole pages are mapped to memory as they are needed."""

    __slots__ = ("address", "num_bytes", "page_bytes")

    def __init__(self, address: int, num_bytes: int, page_bytes: int) -> None:
        self.address = address
        self.num_bytes = num_bytes
        self.page_bytes = page_bytes


class Block:
    """A range of device memory, allocated or free, and its neighbours in the same segment.

    `is_free` means that it can be handed out (or merged with a free neighbour). Neither live nor free are a block that was freed while other
    streams (`uses`) still use it, and an unmapped range of an expandable segment. `cached_at` is the number of searches of the large pool
    when the block became free, from which garbage collection takes its age.
    """

    __slots__ = (
        "address",
        "cached_at",
        "is_free",
        "is_live",
        "is_mapped",
        "next",
        "pool",
        "prev",
        "requested_bytes",
        "segment",
        "size",
        "uses",
    )

    def __init__(self, address: int, size: int, pool: "Pool", segment: ExpandableSegment | None) -> None:
        self.address = address
        self.size = size
        self.pool = pool
        self.segment = segment
        self.prev: Block | None = None
        self.next: Block | None = None
        self.is_free = False
        self.is_live = False
        self.is_mapped = True
        self.uses: set[int] | None = None
        self.requested_bytes = 0
        self.cached_at = 0

    def splice(self, before: "Block | None", after: "Block | None") -> None:
        """Puts this block between two neighbours."""
        self.prev, self.next = before, after
        if before is not None:
            before.next = self
        if after is not None:
            after.prev = self

    def record_stream(self, stream: int) -> None:
        """Marks the block as used on `stream`, so that a free waits for that stream."""
        # recordStream ignores the allocation stream, whose kernels run in order anyway.
        if stream != self.pool.stream:
            if self.uses is None:
                self.uses = set()
            self.uses.add(stream)

    def absorb(self, other: "Block") -> None:
        """Merges a neighbour into this block; the neighbour must not be used afterwards."""
        self.size += other.size
        if self.prev is other:
            self.address = other.address
            self.splice(other.prev, self.next)
        else:
            self.splice(self.prev, other.next)


class Pool:
    """The free blocks of one stream, small or large: `keys` hold size and address packed into one integer each, sorted."""

    __slots__ = ("blocks", "is_small", "keys", "min_rest_bytes", "stream", "unmapped")

    def __init__(self, *, stream: int, is_small: bool, min_rest_bytes: int) -> None:
        self.stream = stream
        self.is_small = is_small
        self.min_rest_bytes = min_rest_bytes
        self.keys: list[int] = []
        self.blocks: dict[int, Block] = {}
        self.unmapped: list[Block] = []

    def add(self, block: Block) -> None:
        """Adds a block that became free."""
        key = block.size << ADDRESS_BITS | block.address
        insort(self.keys, key)
        self.blocks[key] = block
        block.is_free = True

    def remove(self, block: Block) -> None:
        """Removes a block that is allocated, merged or freed to the driver."""
        key = block.size << ADDRESS_BITS | block.address
        del self.keys[bisect_left(self.keys, key)]
        del self.blocks[key]
        block.is_free = False

    def free_blocks(self) -> list[Block]:
        """The free blocks by size, then address."""
        return [self.blocks[key] for key in self.keys]


class Pools:
    """The pools of all streams: `small` and `large`, by stream."""

    def __init__(self, settings: AllocatorSettings) -> None:
        self.small: dict[int, Pool] = {}
        self.large: dict[int, Pool] = {}
        self._is_expandable = settings.expandable_segments

    def of(self, stream: int, *, is_small: bool) -> Pool:
        """The small or large pool of a stream."""
        pools = self.small if is_small else self.large
        if stream not in pools:
            # should_split: the small pool and expandable segments split off any remainder of 512 bytes or more, the large pool only
            # remainders above 1 MiB (strictly greater).
            eager = is_small or self._is_expandable
            pools[stream] = Pool(
                stream=stream, is_small=is_small, min_rest_bytes=MIN_BLOCK_BYTES if eager else SMALL_BYTES + 1
            )
        return pools[stream]

    def free_blocks(self) -> list[Block]:
        """Every free block of all streams: the cache."""
        pools = (*self.large.values(), *self.small.values())
        return [block for pool in pools for block in pool.free_blocks()]
