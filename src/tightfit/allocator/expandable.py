"""Expandable segments of the caching allocator: address space that is mapped to memory page by page.

The rules are `find_expandable_block`, `map_block`, `try_allocate_expandable_block` and `unmap_block` of torch 2.13
(c10/cuda/CUDACachingAllocator.cpp). Pages are 2 MiB in the small pool and `large_segment_size` in the large one; a request maps only the
pages that it lacks, at the lowest address that can hold it, and only whole free pages are ever unmapped.
"""

from bisect import insort
from collections.abc import Callable
from operator import attrgetter

from tightfit.allocator.pools import SMALL_SEGMENT_BYTES, Block, ExpandableSegment, Pool

_by_address = attrgetter("address")


class Mapper:
    """Maps and unmaps pages. `on_map` returns whether the driver has that many bytes left, and `on_unmap` is called with what is unmapped."""

    def __init__(
        self,
        *,
        large_page_bytes: int,
        address_space_bytes: int,
        place: Callable[[int, int], int],
        on_map: Callable[[Block, int], bool],
        on_unmap: Callable[[int, int], None],
    ) -> None:
        self._large_page_bytes = large_page_bytes
        self._address_space_bytes = address_space_bytes
        self._place = place
        self._on_map = on_map
        self._on_unmap = on_unmap

    def best_fit(self, pool: Pool, at: int) -> int:
        """The index of the best free block, starting at the first that is large enough: while the next one can grow less, take that one."""
        keys, blocks = pool.keys, pool.blocks
        while at + 1 < len(keys):
            block, following = blocks[keys[at]], blocks[keys[at + 1]]
            # Local, as in get_free_block: torch walks forward only while the next block is better, it does not look for the minimum.
            if block.segment is None or _growable_bytes(following) >= _growable_bytes(block):
                break
            at += 1
        return at

    def allocate(self, size: int, pool: Pool) -> Block | None:
        """A fully mapped block of at least `size` bytes, or None where the driver has no memory (or addresses) left for it."""
        if size > self._address_space_bytes:
            return None
        block = self._find(size, pool)
        if not block.is_mapped and not self._map(block, min(block.size, size)):
            return None
        # The range starts with a free block that is already mapped, so only the shortfall is mapped behind it.
        while block.size < size:
            following = block.next
            assert following is not None, "the address space that was found reaches far enough"
            # Pages mapped before a failure stay mapped, as free memory: try_allocate_expandable_block does not roll back either.
            if not self._map(following, min(size - block.size, following.size)):
                return None
            block = following
        # map_block puts the merged range into the pool of free blocks; it leaves it again here.
        pool.remove(block)
        return block

    def release(self, block: Block) -> None:
        """Unmaps the whole pages inside a free block."""
        pool = block.pool
        begin, end = whole_pages(block)
        if begin >= end:
            return
        pool.remove(block)
        # What lies outside of whole pages stays mapped, as free blocks of its own before and behind the unmapped range.
        if begin > block.address:
            self._cut(block, block.address, begin - block.address).splice(block.prev, block)
        if end < block.address + block.size:
            self._cut(block, end, block.address + block.size - end).splice(block, block.next)
        block.address, block.size, block.is_mapped = begin, end - begin, False
        self._on_unmap(begin, end - begin)
        for neighbour in (block.prev, block.next):
            if neighbour is not None and not neighbour.is_mapped:
                pool.unmapped.remove(neighbour)
                block.absorb(neighbour)
        # A segment that is unmapped as a whole is destroyed (release_expandable_segment), and with it its range of addresses.
        if block.prev is not None or block.next is not None:
            insort(pool.unmapped, block, key=_by_address)

    def _find(self, size: int, pool: Pool) -> Block:
        for block in pool.unmapped:
            # Lowest address first, together with a free block right before it: gaps from earlier unmapping are closed before the
            # segment grows at its end (find_expandable_block).
            before = block.prev
            start = before if before is not None and before.is_free else block
            if _has_room(start, size):
                return start
        # No range is left: reserve addresses. Nothing is mapped, so this costs no memory.
        page = SMALL_SEGMENT_BYTES if pool.is_small else self._large_page_bytes
        num_bytes = -(-self._address_space_bytes // page) * page
        segment = ExpandableSegment(self._place(num_bytes, pool.stream), num_bytes, page)
        block = Block(segment.address, num_bytes, pool, segment)
        block.is_mapped = False
        insort(pool.unmapped, block, key=_by_address)
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Maps the first pages of an unmapped range and merges them with free neighbours; False where there is no memory left."""
        pool, segment = block.pool, block.segment
        assert segment is not None, "only expandable segments have unmapped ranges"
        num_bytes = -(-size // segment.page_bytes) * segment.page_bytes
        if not self._on_map(block, num_bytes):
            return False
        pool.unmapped.remove(block)
        block.is_mapped = True
        if num_bytes < block.size:
            rest = Block(block.address + num_bytes, block.size - num_bytes, pool, segment)
            rest.is_mapped = False
            rest.splice(block, block.next)
            block.size = num_bytes
            insort(pool.unmapped, rest, key=_by_address)
        for neighbour in (block.prev, block.next):
            if neighbour is not None and neighbour.is_free:
                pool.remove(neighbour)
                block.absorb(neighbour)
        pool.add(block)
        return True

    @staticmethod
    def _cut(block: Block, address: int, size: int) -> Block:
        piece = Block(address, size, block.pool, block.segment)
        block.pool.add(piece)
        return piece


def whole_pages(block: Block) -> tuple[int, int]:
    """Where the first whole page inside a block of an expandable segment begins and the last one ends; the end is not larger if there is none."""
    segment = block.segment
    assert segment is not None, "only blocks of expandable segments have pages"
    page = segment.page_bytes
    begin = segment.address + -(-(block.address - segment.address) // page) * page
    end = segment.address + (block.address + block.size - segment.address) // page * page
    return begin, end


def _growable_bytes(block: Block) -> int:
    """The size that a free block reaches once the unmapped range behind it is mapped (expandable_size)."""
    following = block.next
    return block.size + (following.size if following is not None and not following.is_mapped else 0)


def _has_room(start: Block, size: int) -> bool:
    block: Block | None = start
    num_bytes = 0
    # Only free or unmapped neighbours count; a block in use ends the range.
    while num_bytes < size and block is not None and (block.is_free or not block.is_mapped):
        num_bytes += block.size
        block = block.next
    return num_bytes >= size
