"""A simulation of torch's CUDA caching allocator that is exact to the byte: which block, which segment, when the driver is asked.

It follows c10/cuda/CUDACachingAllocator.cpp of torch 2.13: rounding, a small and a large pool per stream, best fit with ties to the
lowest address, splitting, merging, `max_split_size`, garbage collection, expandable segments, `record_stream`, and the retries before an
out-of-memory error. Functions of that file are named in parentheses. Every allocation of a trace passes through here, so the common case
is inlined in `malloc` and `free`, and everything rare is a method of its own, or in `driver_memory`.
"""

import sys
from bisect import bisect_left, insort
from collections.abc import Callable
from operator import attrgetter

from tightfit.allocator.counters import Counters
from tightfit.allocator.driver_memory import DriverMemory
from tightfit.allocator.pools import (
    ADDRESS_BITS,
    MIN_BLOCK_BYTES,
    SMALL_BYTES,
    Block,
    Pool,
    Pools,
    rounded,
)
from tightfit.allocator.settings import AllocatorSettings

_UNKNOWN_TOTAL_BYTES = 1 << 40


class OutOfDeviceMemory(Exception):
    """The simulated out-of-memory error: the request (rounded as the allocator does) and what was allocated and reserved. All in bytes."""

    def __init__(self, *, requested_bytes: int, reserved_bytes: int, allocated_bytes: int, free_bytes: int) -> None:
        super().__init__(
            f"{requested_bytes} bytes requested, {allocated_bytes} allocated, {reserved_bytes} reserved, {free_bytes} left"
        )
        self.requested_bytes = requested_bytes
        self.reserved_bytes = reserved_bytes
        self.allocated_bytes = allocated_bytes
        self.free_bytes = free_bytes


class CachingAllocator(Counters):
    """The caching allocator of one device."""

    def __init__(
        self,
        settings: AllocatorSettings,
        *,
        capacity_bytes: int | None = None,
        total_bytes: int | None = None,
        place_segment: Callable[[int, int], int] | None = None,
    ) -> None:
        """`capacity_bytes` is the limit on reserved bytes that `set_per_process_memory_fraction` sets; `total_bytes` the GPU's memory.

        As in torch, the first is checked before pages of an expandable segment are rounded up, and may be exceeded by less than a page.

        `place_segment(num_bytes, stream)` gives the address of a new segment (by default increasing addresses, far apart).
        """
        super().__init__()
        self.settings = settings
        self.capacity_bytes = _limit_bytes(settings, capacity_bytes, total_bytes)
        self.total_bytes = total_bytes
        self.pools = Pools(settings)
        # The pools by stream, without a detour by `pools`.
        self._small, self._large = self.pools.small, self.pools.large
        self._waiting: dict[Block, None] = {}
        self._max_split = settings.max_split_size_bytes or sys.maxsize
        # should_split: without expandable segments a request at or above max_split_size takes its block whole.
        self._split_below = sys.maxsize if settings.expandable_segments else self._max_split
        self._divisions = settings.roundup_power2_divisions
        self._rounds_up = any(count > 1 for count in self._divisions)
        # malloc() collects only once a memory fraction is set: the threshold is a share of that limit.
        self._collects = self.capacity_bytes is not None and settings.garbage_collection_threshold > 0
        self._num_large_searches = 0
        # In the default configuration best fit is the first key that is large enough, so `malloc` bisects without calling _search.
        self._searches_plainly = not (self._collects or settings.max_split_size_bytes or settings.expandable_segments)
        # ExpandableSegment reserves addresses for 9/8 of the GPU's memory, so that pages unmapped early in it can go to its end.
        self.address_space_bytes = (total_bytes or capacity_bytes or _UNKNOWN_TOTAL_BYTES) * 9 // 8
        self.driver = DriverMemory(
            settings,
            self,
            capacity_bytes=self.capacity_bytes,
            total_bytes=total_bytes,
            address_space_bytes=self.address_space_bytes,
            place=place_segment,
        )

    def malloc(self, num_bytes: int, stream: int = 0) -> Block:
        """A block of at least `num_bytes` for use on `stream`.

        Raises:
            OutOfDeviceMemory: the limit is reached, also after the cache was emptied.
        """
        # The default rounding, inlined: a call of `rounded` for each of some 10,000 requests a step is measurable.
        if self._rounds_up:
            size = rounded(num_bytes, self._divisions)
        else:
            size = (num_bytes + 511) & -512 if num_bytes > MIN_BLOCK_BYTES else MIN_BLOCK_BYTES
        pools = self._small if size <= SMALL_BYTES else self._large
        pool = pools.get(stream)
        if pool is None:
            pool = self.pools.of(stream, is_small=pools is self._small)
        keys = pool.keys
        # The key of (size, address 0) sorts before every block of this size, so equal sizes yield the lowest address, which is
        # how BlockComparatorSize breaks ties.
        at = bisect_left(keys, size << ADDRESS_BITS) if self._searches_plainly else self._search(pool, size)
        if at < len(keys):
            block = pool.blocks.pop(keys.pop(at))
            block.is_free = False
        else:
            block = self._grow(pool, size)
        # alloc_found_block splits here; `min_rest_bytes` is the remainder that should_split asks for.
        if block.size - size >= pool.min_rest_bytes and size < self._split_below:
            self._split(block, size)
        # A free piece of a split segment becomes active; torch keeps inactive_split for non-expandable segments only.
        elif block.segment is None and (block.prev is not None or block.next is not None):
            self._count_split(-block.size)
        block.is_live = True
        block.requested_bytes = num_bytes
        self._count_malloc(block.size, num_bytes)
        return block

    def free(self, block: Block) -> None:
        """Frees `block`; it is reusable at once unless another stream has used it."""
        # allocated_bytes drops when the free is requested (FREE_REQUESTED), even where the block is reusable only later.
        block.is_live = False
        self.allocated_bytes -= block.size
        self.num_live -= 1
        if block.uses:
            self.waiting_bytes += block.size
            self._waiting[block] = None
        else:
            self._reclaim(block)

    def complete(self, block: Block, uses: set[int] | None = None) -> None:
        """Completes the free of a `block` that waits for other streams; no effect on any other block.

        Where the cache can have been emptied since, which completes it and may hand it out again, `uses` are those it was freed with.
        """
        if block in self._waiting and (uses is None or uses is block.uses):
            del self._waiting[block]
            self.waiting_bytes -= block.size
            block.uses = None
            self._reclaim(block)

    def synchronize(self) -> None:
        """Synchronises all streams: every freed block becomes reusable."""
        for block in list(self._waiting):
            self.complete(block)

    def empty_cache(self) -> None:
        """Frees every unused segment (or page) to the driver, except those of private pools, which have negative streams."""
        self.synchronize()
        for pools in (self._large, self._small):
            self.driver.release_cached(pools)

    def adopt(self, block: Block, neighbour: Block | None) -> None:
        """Adds an existing block right after its `neighbour` in the same segment, to reconstruct the start of a recording."""
        block.splice(neighbour, None)
        # From now on a pool can hold expandable and plain blocks, which only _search tells apart.
        if block.segment is not None:
            self._searches_plainly = False
        if not block.is_mapped:
            insort(block.pool.unmapped, block, key=attrgetter("address"))
        elif block.is_live:
            self.allocated_bytes += block.size
            self.requested_bytes += block.requested_bytes
            self.num_live += 1
        # Active but not allocated: freed before the recording began, with events of other streams outstanding.
        elif block.uses:
            self._waiting[block] = None
            self.waiting_bytes += block.size
            self.requested_bytes += block.requested_bytes
        else:
            block.pool.add(block)

    def _split(self, block: Block, size: int) -> None:
        """Shrinks `block` to its first `size` bytes; the rest becomes a free block."""
        pool, after = block.pool, block.next
        address, rest_bytes = block.address + size, block.size - size
        if block.segment is None:
            # A whole segment becomes a split one and its remainder inactive, or an inactive piece shrinks by what is taken from it.
            self._count_split(rest_bytes if after is None and block.prev is None else -size)
        rest = Block(address, rest_bytes, pool, block.segment)
        rest.prev, rest.next = block, after
        if after is not None:
            after.prev = rest
        block.next = rest
        block.size = size
        rest.cached_at = self._num_large_searches
        pool.add(rest)

    def _reclaim(self, block: Block) -> None:
        """Merges a block with its free neighbours and puts it into its pool (free_block)."""
        pool, size = block.pool, block.size
        # Only now, not in `free`: free_block lowers requested_bytes, when the last event of another stream has passed.
        self.requested_bytes -= block.requested_bytes
        before, after = block.prev, block.next
        if before is not None and before.is_free:
            pool.remove(before)
            block.absorb(before)
        if after is not None and after.is_free:
            pool.remove(after)
            block.absorb(after)
        # insert_into_blocks stamps gc_count_base at every insertion, so a block that has just merged counts as fresh.
        block.cached_at = self._num_large_searches
        pool.add(block)
        if block.segment is None:
            # A segment that became whole again is not split any more: its pieces, now merged, leave inactive_split.
            is_whole = block.prev is None and block.next is None
            self._count_split(size - block.size if is_whole else size)

    def _search(self, pool: Pool, size: int) -> int:
        """The index of the best-fitting free block, past the end if there is none (get_free_block)."""
        # get_free_block counts calls while garbage collection is on; the age of a block is the number of calls since it was cached.
        # A private pool has a count of its own, and is not collected.
        if self._collects and not pool.is_small and pool.stream >= 0:
            self._num_large_searches += 1
        keys, blocks = pool.keys, pool.blocks
        at = bisect_left(keys, size << ADDRESS_BITS)
        if self.settings.expandable_segments:
            at = self.driver.mapper.best_fit(pool, at)
        else:
            # Expandable segments can be switched off at run time (their memory cannot be shared over CUDA IPC). Blocks that are left in
            # them are skipped then.
            while at < len(keys) and blocks[keys[at]].segment is not None:
                at += 1
        if at < len(keys):
            found = keys[at] >> ADDRESS_BITS
            # An oversize block never serves a smaller request, and an oversize request only takes a block that is barely larger.
            # The blocks that follow are larger still, so the search ends here.
            if size < self._max_split <= found:
                return len(keys)
            if size >= self._max_split and found >= size + self.settings.max_non_split_rounding_bytes:
                return len(keys)
        return at

    def _grow(self, pool: Pool, size: int) -> Block:
        """A block from the driver, for which cached segments are freed if necessary."""
        if self._collects:
            self.driver.collect_garbage(self._large, self._num_large_searches)
        block = self.driver.allocate(pool, size)
        # The order of malloc() in torch: retry after freeing oversize blocks, then after freeing the whole cache.
        if block is None and self.driver.release_oversize(pool, size):
            block = self.driver.allocate(pool, size)
        if block is None:
            self.empty_cache()
            # Counted for the attempt after the cache was emptied only (isRetry of alloc_block), successful or not.
            self.num_alloc_retries += 1
            block = self.driver.allocate(pool, size)
        if block is None:
            self.num_ooms += 1
            limits = (bound for bound in (self.capacity_bytes, self.total_bytes) if bound is not None)
            limit_bytes = min(limits, default=self.address_space_bytes)
            raise OutOfDeviceMemory(
                requested_bytes=size,
                reserved_bytes=self.reserved_bytes,
                allocated_bytes=self.allocated_bytes,
                free_bytes=max(0, limit_bytes - self.reserved_bytes),
            )
        return block


def _limit_bytes(settings: AllocatorSettings, capacity_bytes: int | None, total_bytes: int | None) -> int | None:
    """The limit on reserved bytes; a fraction below 1 applies to the GPU's memory, or to the capacity where only that is known."""
    whole_bytes = total_bytes or capacity_bytes
    if settings.per_process_memory_fraction >= 1 or whole_bytes is None:
        return capacity_bytes
    fraction_bytes = int(settings.per_process_memory_fraction * whole_bytes)
    return fraction_bytes if capacity_bytes is None else min(capacity_bytes, fraction_bytes)
