"""A simulation of torch's CUDA caching allocator that is exact to the byte: which block, which segment, when the driver is asked.

It follows c10/cuda/CUDACachingAllocator.cpp of torch 2.13: rounding, a small and a large pool per stream, best fit with ties to the
lowest address, splitting, merging, `max_split_size`, garbage collection, expandable segments, `record_stream`, and the retries before an
out-of-memory error. Functions of that file are named in parentheses. Every allocation of a trace passes through here, so the common case
is inlined in `malloc` and `free`, and everything rare is a method of its own.
"""

import sys
from bisect import bisect_left, insort
from collections.abc import Callable
from functools import partial
from operator import attrgetter

from tightfit.allocator.counters import Counters
from tightfit.allocator.expandable import Mapper
from tightfit.allocator.pools import (
    ADDRESS_BITS,
    LARGE_ROUNDING_BYTES,
    MIN_BLOCK_BYTES,
    SMALL_BYTES,
    Block,
    Pool,
    rounded,
    segment_bytes,
)
from tightfit.allocator.settings import AllocatorSettings
from tightfit.units import GIB

_FIRST_ADDRESS = 1 << 40
_GAP_BYTES = GIB
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
        self._small: dict[int, Pool] = {}
        self._large: dict[int, Pool] = {}
        self._waiting: dict[Block, None] = {}
        self._next_address = _FIRST_ADDRESS
        self._place = place_segment or self._place_next
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
        self._mapper = Mapper(
            large_page_bytes=settings.large_segment_size_bytes,
            address_space_bytes=self.address_space_bytes,
            place=self._place,
            on_map=self._note_map,
            on_unmap=partial(self._count_returned, "segment_unmap"),
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
            pool = self.pool_of(stream, is_small=pools is self._small)
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

    def record_stream(self, block: Block, stream: int) -> None:
        """Marks `block` as used on `stream`, so that a free waits for that stream."""
        # recordStream ignores the allocation stream, whose kernels run in order anyway.
        if stream != block.pool.stream:
            if block.uses is None:
                block.uses = set()
            block.uses.add(stream)

    def complete(self, block: Block) -> None:
        """Completes the free of a `block` that waits for other streams; no effect on any other block."""
        if block in self._waiting:
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
            # release_cached_blocks gives back private pools only once their CUDA graph is gone. Streams in order, because torch's
            # set of free blocks is ordered by stream first and a recording shows the calls in that order.
            shared = sorted(stream for stream in pools if stream >= 0)
            paged = [block for stream in shared for block in self._release_whole_segments(pools[stream])]
            # release_blocks gathers the expandable blocks first as well: unmapping changes the set that it iterates over.
            for block in paged:
                self._mapper.release(block)

    def give_back(self, block: Block) -> None:
        """Frees a free block to the driver if it is a whole segment, or else the whole pages in it."""
        if block.segment is not None:
            self._mapper.release(block)
        elif block.prev is None and block.next is None:
            self._release_segment(block)

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

    def adopt_memory(self, num_bytes: int, *, is_segment: bool) -> None:
        """Counts `num_bytes` as reserved before the start: as one segment, or as pages of an expandable one."""
        self.reserved_bytes += num_bytes
        self.num_segments += is_segment

    def pool_of(self, stream: int, *, is_small: bool) -> Pool:
        """The small or large pool of a stream."""
        pools = self._small if is_small else self._large
        if stream not in pools:
            # should_split: the small pool and expandable segments split off any remainder of 512 bytes or more, the large pool only
            # remainders above 1 MiB (strictly greater).
            eager = is_small or self.settings.expandable_segments
            pools[stream] = Pool(
                stream=stream, is_small=is_small, min_rest_bytes=MIN_BLOCK_BYTES if eager else SMALL_BYTES + 1
            )
        return pools[stream]

    def free_blocks(self) -> list[Block]:
        """Every free block of all streams: the cache."""
        pools = (*self._large.values(), *self._small.values())
        return [block for pool in pools for block in pool.free_blocks()]

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
        if self._collects and not pool.is_small:
            self._num_large_searches += 1
        keys, blocks = pool.keys, pool.blocks
        at = bisect_left(keys, size << ADDRESS_BITS)
        if self.settings.expandable_segments:
            at = self._mapper.best_fit(pool, at)
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
            self._collect_garbage()
        block = self._ask_driver(pool, size)
        # The order of malloc() in torch: retry after freeing oversize blocks, then after freeing the whole cache.
        if block is None and self._release_oversize(pool, size):
            block = self._ask_driver(pool, size)
        if block is None:
            self.empty_cache()
            # Counted for the attempt after the cache was emptied only (isRetry of alloc_block), successful or not.
            self.num_alloc_retries += 1
            block = self._ask_driver(pool, size)
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

    def _ask_driver(self, pool: Pool, size: int) -> Block | None:
        """A new segment, or more pages, for a block of `size` bytes; None if a limit forbids it (alloc_block)."""
        num_bytes = segment_bytes(size, self.settings.large_segment_size_bytes)
        # The limit is compared with the whole segment: a request of 3 MiB counts 20 MiB, with expandable segments too.
        if self.capacity_bytes is not None and self.reserved_bytes + num_bytes > self.capacity_bytes:
            return None
        if self.settings.expandable_segments:
            return self._mapper.allocate(size, pool)
        if self.total_bytes is not None and self.reserved_bytes + num_bytes > self.total_bytes:
            return None
        block = Block(self._place(num_bytes, pool.stream), num_bytes, pool, None)
        self._count_given("segment_alloc", block.address, num_bytes)
        return block

    def _collect_garbage(self) -> None:
        """Frees whole segments that were cached longer than the average (garbage_collect_cached_blocks)."""
        assert self.capacity_bytes is not None, "only a bounded allocator collects"
        target_bytes = self.reserved_bytes - int(self.settings.garbage_collection_threshold * self.capacity_bytes)
        now = self._num_large_searches
        # Private pools (negative streams) have block sets of their own, which garbage_collect_cached_blocks does not visit.
        whole = [
            block
            for stream, pool in self._large.items()
            for block in pool.free_blocks()
            if stream >= 0 and block.prev is None and block.next is None
        ]
        num_whole, total_age = len(whole), sum(now - block.cached_at for block in whole)
        freed_bytes = 0
        # Each round frees every block of at least the average age, even beyond the target, so that collection stays rare.
        while freed_bytes < target_bytes and num_whole:
            threshold = total_age / num_whole
            old = [block for block in whole if block.segment is None and now - block.cached_at >= threshold]
            if not old:
                break
            for block in old:
                whole.remove(block)
                freed_bytes += block.size
                total_age -= now - block.cached_at
                num_whole -= 1
                self._release_segment(block)

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Frees oversize blocks, just enough for a block of `size` bytes (release_available_cached_blocks)."""
        if self.settings.max_split_size_bytes is None:
            return False
        # Blocks below max_split_size may be split and serve others, so only oversize ones are given back here: the smallest that
        # suffices, or else several from the largest down.
        wanted_bytes = max(size, self._max_split)
        at = bisect_left(pool.keys, wanted_bytes << ADDRESS_BITS)
        blocks = pool.free_blocks()
        if at < len(blocks) and blocks[at].segment is None:
            self._release_segment(blocks[at])
            return True
        released_bytes = 0
        for block in reversed(blocks[:at]):
            if released_bytes >= wanted_bytes or block.size < self._max_split:
                break
            if block.segment is None:
                released_bytes += block.size
                self._release_segment(block)
        return released_bytes >= wanted_bytes

    def _release_whole_segments(self, pool: Pool) -> list[Block]:
        """Frees the segments that are one free block, and returns the free blocks of expandable ones (release_blocks)."""
        blocks = pool.free_blocks()
        for block in blocks:
            if block.segment is None and block.prev is None and block.next is None:
                self._release_segment(block)
        return [block for block in blocks if block.segment is not None]

    def _release_segment(self, block: Block) -> None:
        block.pool.remove(block)
        self._count_returned("segment_free", block.address, block.size)

    def _note_map(self, block: Block, num_bytes: int) -> bool:
        if self.total_bytes is not None and self.reserved_bytes + num_bytes > self.total_bytes:
            return False
        self._count_given("segment_map", block.address, num_bytes)
        return True

    def _place_next(self, num_bytes: int, _stream: int) -> int:
        address = self._next_address
        self._next_address += -(-num_bytes // LARGE_ROUNDING_BYTES) * LARGE_ROUNDING_BYTES + _GAP_BYTES
        return address


def _limit_bytes(settings: AllocatorSettings, capacity_bytes: int | None, total_bytes: int | None) -> int | None:
    """The limit on reserved bytes; a fraction below 1 applies to the GPU's memory, or to the capacity where only that is known."""
    whole_bytes = total_bytes or capacity_bytes
    if settings.per_process_memory_fraction >= 1 or whole_bytes is None:
        return capacity_bytes
    fraction_bytes = int(settings.per_process_memory_fraction * whole_bytes)
    return fraction_bytes if capacity_bytes is None else min(capacity_bytes, fraction_bytes)
