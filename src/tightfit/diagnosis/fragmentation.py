"""Reserved but unused memory at one time step of a replay, by cause, and the allocations that pin it.

Each free byte has one cause: the cache of another stream, the small pool, a segment (or page) that is free as a whole, or a piece of a segment
that is pinned by its neighbours. `empty_cache` returns whole segments, and of expandable segments the whole pages inside free blocks
(`release_cached_blocks` and `unmap_block` of torch 2.13, c10/cuda/CUDACachingAllocator.cpp).
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping

from tightfit.allocator.caching import CachingAllocator
from tightfit.allocator.expandable import whole_pages
from tightfit.allocator.pools import Block


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """An allocated block of `live_bytes` at `address` next to free pieces of its segment, of which `pinned_bytes` are its share."""

    address: int
    live_bytes: int
    pinned_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fragmentation:
    """The allocator's bytes at one time step.

    `reserved_bytes` = `allocated_bytes` + `waiting_bytes` (freed, but another stream still uses them) + the five causes, which are free. Of
    those, `returnable_bytes` is what `empty_cache` frees. `rounding_bytes` is part of the allocated ones: block sizes minus requested sizes.
    `pins` are the neighbours of the pinned pieces.
    """

    reserved_bytes: int
    allocated_bytes: int
    waiting_bytes: int
    whole_segments_bytes: int
    whole_pages_bytes: int
    pinned_bytes: int
    small_pool_bytes: int
    other_streams_bytes: int
    returnable_bytes: int
    rounding_bytes: int
    largest_free_bytes: int
    pins: tuple[Pin, ...]

    @property
    def free_bytes(self) -> int:
        """Reserved but unused bytes."""
        return self.reserved_bytes - self.allocated_bytes - self.waiting_bytes


def fragmentation_of(allocator: CachingAllocator, blocks: Mapping[int, Block]) -> Fragmentation:
    """The fragmentation of `allocator` now; `blocks` are the allocated ones. The stream with the most allocated bytes is the main one."""
    held: Counter[int] = Counter()
    for block in blocks.values():
        held[block.pool.stream] += block.size
    # Pools are per stream: what another stream has cached cannot serve the main one before the cache is emptied.
    main = max(held, key=lambda stream: (held[stream], -stream), default=0)
    causes: Counter[str] = Counter()
    pinned: Counter[Block] = Counter()
    returnable_bytes = largest_bytes = 0
    for block in allocator.pools.free_blocks():
        # By walking the blocks: torch's inactive_split statistic leaves expandable segments out, so it cannot tell what is returnable.
        returned_bytes = _returnable_bytes(block)
        returnable_bytes += returned_bytes
        largest_bytes = max(largest_bytes, block.size)
        if block.pool.stream != main:
            causes["other"] += block.size
        # Free memory in 2 MiB segments cannot serve a request above 1 MiB.
        elif block.pool.is_small:
            causes["small"] += block.size
        else:
            causes["segments" if block.segment is None else "pages"] += returned_bytes
            rest_bytes = block.size - returned_bytes
            causes["pinned"] += rest_bytes
            _share(rest_bytes, block, pinned)
    return Fragmentation(
        reserved_bytes=allocator.reserved_bytes,
        allocated_bytes=allocator.allocated_bytes,
        waiting_bytes=allocator.waiting_bytes,
        whole_segments_bytes=causes["segments"],
        whole_pages_bytes=causes["pages"],
        pinned_bytes=causes["pinned"],
        small_pool_bytes=causes["small"],
        other_streams_bytes=causes["other"],
        returnable_bytes=returnable_bytes,
        rounding_bytes=sum(block.size - block.requested_bytes for block in blocks.values() if block.is_live),
        largest_free_bytes=largest_bytes,
        pins=tuple(
            Pin(address=block.address, live_bytes=block.size, pinned_bytes=num_bytes)
            for block, num_bytes in pinned.most_common()
        ),
    )


def _returnable_bytes(block: Block) -> int:
    """The bytes of a free block that `empty_cache` would free; none of a private pool, whose streams are negative."""
    if block.pool.stream < 0:
        return 0
    if block.segment is None:
        return block.size if block.prev is None and block.next is None else 0
    begin, end = whole_pages(block)
    return max(0, end - begin)


def _share(num_bytes: int, block: Block, pinned: Counter[Block]) -> None:
    """Divides the bytes of a free piece among its allocated neighbours."""
    neighbours = list(_in_use(block))
    # Free neighbours are always merged, so the neighbours of a free block are in use or unmapped.
    for neighbour in neighbours:
        pinned[neighbour] += num_bytes // len(neighbours)


def _in_use(block: Block) -> Iterable[Block]:
    return (b for b in (block.prev, block.next) if b is not None and b.is_mapped and not b.is_free)
