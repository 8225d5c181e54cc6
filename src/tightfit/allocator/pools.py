"""Blocks of device memory, the pools that hold the free ones, and the sizes that torch's caching allocator rounds to.

The constants and rules are those of torch 2.13: c10/core/AllocatorConfig.h and c10/cuda/CUDACachingAllocator.cpp, whose names stand
beside them. A pool keeps its free blocks ordered by size, then address, as plain integers, so that best fit is one bisection.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence

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

ADDRESS_BITS = 64
_FIRST_INTERVAL_BITS = SMALL_BYTES.bit_length()


def rounded(num_bytes: int, divisions: Sequence[int]) -> int:
    """The size of the block for a request of `num_bytes` (round_size); `divisions` is `AllocatorSettings.roundup_power2_divisions`."""
    if num_bytes < MIN_BLOCK_BYTES:
        return MIN_BLOCK_BYTES
    interval = min(max(num_bytes.bit_length() - _FIRST_INTERVAL_BITS, 0), len(divisions) - 1)
    count = divisions[interval]
    if count > 1 and num_bytes > MIN_BLOCK_BYTES * count:
        step = (1 << (num_bytes.bit_length() - 1)) // count
        return -(-num_bytes // step) * step
    return -(-num_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES


def segment_bytes(size: int, large_segment_bytes: int) -> int:
    """The size of the segment that is asked of the driver for a block of `size` bytes (get_allocation_size)."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
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
    """A range of device memory, in use or free, and its neighbours in the same segment.

    `is_free` says that it may be handed out (or merged with a free neighbour); a block that was freed while other streams still use it
    (`num_events` of them) is neither live nor free, and so is a stretch of an expandable segment that is not mapped. `cached_at` counts
    searches of the large pool, and serves garbage collection.
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

    def absorb(self, other: "Block") -> None:
        """Takes over the range of a neighbour, which is then no more."""
        self.size += other.size
        if self.prev is other:
            self.address = other.address
            self.splice(other.prev, self.next)
        else:
            self.splice(self.prev, other.next)


class Pool:
    """The free blocks of one stream, small or large: `keys` are sizes and addresses in one integer each, in order."""

    __slots__ = ("blocks", "is_small", "keys", "min_rest_bytes", "stream", "unmapped")

    def __init__(self, *, stream: int, is_small: bool, min_rest_bytes: int) -> None:
        self.stream = stream
        self.is_small = is_small
        self.min_rest_bytes = min_rest_bytes
        self.keys: list[int] = []
        self.blocks: dict[int, Block] = {}
        self.unmapped: list[Block] = []

    def add(self, block: Block) -> None:
        """`block` is free from now on."""
        key = block.size << ADDRESS_BITS | block.address
        insort(self.keys, key)
        self.blocks[key] = block
        block.is_free = True

    def remove(self, block: Block) -> None:
        """`block` is not free any more."""
        key = block.size << ADDRESS_BITS | block.address
        del self.keys[bisect_left(self.keys, key)]
        del self.blocks[key]
        block.is_free = False

    def free_blocks(self) -> list[Block]:
        """The free blocks by size, then address."""
        return [self.blocks[key] for key in self.keys]
