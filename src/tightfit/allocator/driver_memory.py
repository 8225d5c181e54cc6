"""The segments of the caching allocator: asked of the driver for new blocks, and freed back to it.

Follows alloc_block, release_available_cached_blocks, release_blocks and garbage_collect_cached_blocks of c10/cuda/CUDACachingAllocator.cpp of
torch 2.13. None of this is in the way of a request that a cached block can serve.
"""

import sys
from bisect import bisect_left
from collections.abc import Callable, Mapping
from functools import partial

from tightfit.allocator.counters import Counters
from tightfit.allocator.expandable import Mapper
from tightfit.allocator.pools import ADDRESS_BITS, LARGE_ROUNDING_BYTES, Block, Pool, segment_bytes
from tightfit.allocator.settings import AllocatorSettings
from tightfit.units import GIB

_FIRST_ADDRESS = 1 << 40
_GAP_BYTES = GIB


class DriverMemory:
    """Asks the driver for memory within `capacity_bytes` of the allocator and `total_bytes` of the GPU; `counters` are those of the allocator."""

    def __init__(
        self,
        settings: AllocatorSettings,
        counters: Counters,
        *,
        capacity_bytes: int | None,
        total_bytes: int | None,
        address_space_bytes: int,
        place: Callable[[int, int], int] | None,
    ) -> None:
        self._settings = settings
        self._counters = counters
        self._capacity_bytes = capacity_bytes
        self._total_bytes = total_bytes
        self._next_address = _FIRST_ADDRESS
        self._place = place or self._place_next
        self._max_split = settings.max_split_size_bytes or sys.maxsize
        self.mapper = Mapper(
            large_page_bytes=settings.large_segment_size_bytes,
            address_space_bytes=address_space_bytes,
            place=self._place,
            on_map=self._note_map,
            on_unmap=partial(counters.count_returned, "segment_unmap"),
        )

    def allocate(self, pool: Pool, size: int) -> Block | None:
        """A new segment, or more pages, for a block of `size` bytes; None if a limit forbids it (alloc_block)."""
        num_bytes = segment_bytes(size, self._settings.large_segment_size_bytes)
        reserved_bytes = self._counters.reserved_bytes
        # The limit is compared with the whole segment: a request of 3 MiB counts 20 MiB, with expandable segments too.
        if self._capacity_bytes is not None and reserved_bytes + num_bytes > self._capacity_bytes:
            return None
        if self._settings.expandable_segments:
            return self.mapper.allocate(size, pool)
        if self._total_bytes is not None and reserved_bytes + num_bytes > self._total_bytes:
            return None
        block = Block(self._place(num_bytes, pool.stream), num_bytes, pool, None)
        self._counters.count_given("segment_alloc", block.address, num_bytes)
        return block

    def give_back(self, block: Block) -> None:
        """Frees a free block to the driver if it is a whole segment, or else the whole pages in it."""
        if block.segment is not None:
            self.mapper.release(block)
        elif block.prev is None and block.next is None:
            self._release(block)

    def collect_garbage(self, large: Mapping[int, Pool], now: int) -> None:
        """Frees whole segments that were cached longer than the average (garbage_collect_cached_blocks); `now` counts searches of large pools."""
        assert self._capacity_bytes is not None, "only a bounded allocator collects"
        limit_bytes = int(self._settings.garbage_collection_threshold * self._capacity_bytes)
        target_bytes = self._counters.reserved_bytes - limit_bytes
        # Private pools (negative streams) have block sets of their own, which garbage_collect_cached_blocks does not visit. In order of
        # streams, as torch's set of free blocks is.
        whole = [
            block
            for stream, pool in sorted(large.items())
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
                self._release(block)

    def release_oversize(self, pool: Pool, size: int) -> bool:
        """Frees oversize blocks, just enough for a block of `size` bytes (release_available_cached_blocks)."""
        if self._settings.max_split_size_bytes is None:
            return False
        # Blocks below max_split_size may be split and serve others, so only oversize ones are given back here: the smallest that
        # suffices, or else several from the largest down.
        wanted_bytes = max(size, self._max_split)
        at = bisect_left(pool.keys, wanted_bytes << ADDRESS_BITS)
        blocks = pool.free_blocks()
        if at < len(blocks) and blocks[at].segment is None:
            self._release(blocks[at])
            return True
        released_bytes = 0
        for block in reversed(blocks[:at]):
            if released_bytes >= wanted_bytes or block.size < self._max_split:
                break
            if block.segment is None:
                released_bytes += block.size
                self._release(block)
        return released_bytes >= wanted_bytes

    def release_cached(self, pools: Mapping[int, Pool]) -> None:
        """Frees every unused segment (or page) of these pools by stream, except of private ones, which have negative streams."""
        # release_cached_blocks gives back private pools only once their CUDA graph is gone. Streams in order, because torch's
        # set of free blocks is ordered by stream first and a recording shows the calls in that order.
        shared = sorted(stream for stream in pools if stream >= 0)
        paged = [block for stream in shared for block in self._release_whole(pools[stream])]
        # release_blocks gathers the expandable blocks first as well: unmapping changes the set that it iterates over.
        for block in paged:
            self.mapper.release(block)

    def _release_whole(self, pool: Pool) -> list[Block]:
        """Frees the segments that are one free block, and returns the free blocks of expandable ones (release_blocks)."""
        blocks = pool.free_blocks()
        for block in blocks:
            if block.segment is None and block.prev is None and block.next is None:
                self._release(block)
        return [block for block in blocks if block.segment is not None]

    def _release(self, block: Block) -> None:
        block.pool.remove(block)
        self._counters.count_returned("segment_free", block.address, block.size)

    def _note_map(self, block: Block, num_bytes: int) -> bool:
        if self._total_bytes is not None and self._counters.reserved_bytes + num_bytes > self._total_bytes:
            return False
        self._counters.count_given("segment_map", block.address, num_bytes)
        return True

    def _place_next(self, num_bytes: int, _stream: int) -> int:
        address = self._next_address
        self._next_address += -(-num_bytes // LARGE_ROUNDING_BYTES) * LARGE_ROUNDING_BYTES + _GAP_BYTES
        return address
