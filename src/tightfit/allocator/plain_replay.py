"""A whole tape through the caching allocator with torch's default settings, in one loop.

The same rules as `tightfit.allocator.caching` (see there for their sources), which stays the reference: tests compare the two event by event. Here
a free block is a number in a sorted list and an entry in two tables, by its begin and by its end; what is rare is left to the reference.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

from tightfit.allocator.pools import MIN_BLOCK_BYTES, SMALL_BYTES, segment_bytes
from tightfit.allocator.settings import AllocatorSettings
from tightfit.tape import EventKind

# In units of the smallest block, so that a key of size and address is short. Segments are apart, so that they never merge.
_UNIT_BITS = MIN_BLOCK_BYTES.bit_length() - 1
_ADDRESS_BITS = 40
_ADDRESS_MASK = (1 << _ADDRESS_BITS) - 1
_MAX_SMALL = SMALL_BYTES >> _UNIT_BITS
_ALLOCATE, _FREE = int(EventKind.ALLOCATE), int(EventKind.FREE)
_SYNCHRONIZE, _EMPTY_CACHE = int(EventKind.SYNCHRONIZE), int(EventKind.EMPTY_CACHE)

Events = Iterable[tuple[int, int]]
"""Kind and storage of each."""


class BeyondPlain(Exception):
    """The limit on reserved bytes is reached, or a block waits for another stream: the reference knows what happens then."""


def is_plain(settings: AllocatorSettings) -> bool:
    """Whether `PlainReplay` has the rules of these settings."""
    return settings == AllocatorSettings()


class PlainReplay:
    """`reserved` are the changes of reserved memory, as (index of the event, bytes after it), `block_bytes` the sizes of blocks by storage, and
    `num_returned` the segments that emptied caches gave back."""

    def __init__(self, num_storages: int, capacity_bytes: int | None) -> None:
        self.reserved: list[tuple[int, int]] = []
        self.block_bytes = [0] * num_storages
        self.num_returned = 0
        self._capacity_bytes = capacity_bytes
        self._large_bytes = AllocatorSettings().large_segment_size_bytes
        self._reserved_bytes = 0
        self._next_address = 1
        self._segments: dict[
            int, tuple[int, int, int]
        ] = {}  # by address: size, stream, 1 where it is one of the small pool
        # Free blocks: by stream and pool in order of size and address, and the sizes by begin, the begins by end.
        self._free: dict[tuple[int, int], list[int]] = {}
        self._size_at: dict[int, int] = {}
        self._begin_of_end: dict[int, int] = {}

    def run(self, events: Events, sizes: Sequence[int], streams: Sequence[int]) -> None:
        """Replays the events; storages of 0 bytes are skipped.

        Raises:
            BeyondPlain: not all of it is plain.
        """
        size_at, begin_of_end, pools, block_bytes = self._size_at, self._begin_of_end, self._free, self.block_bytes
        addresses = [0] * len(block_bytes)
        for at, (kind, storage) in enumerate(events):
            num_bytes = sizes[storage] if storage >= 0 else 1
            if not num_bytes:
                continue
            if kind == _ALLOCATE:
                size = (num_bytes + MIN_BLOCK_BYTES - 1) >> _UNIT_BITS
                is_small = size <= _MAX_SMALL
                keys = pools.get((streams[storage], is_small))
                if keys is None:
                    keys = pools[streams[storage], is_small] = []
                place = bisect_left(keys, size << _ADDRESS_BITS)
                if place < len(keys):
                    key = keys.pop(place)
                    address, whole = key & _ADDRESS_MASK, key >> _ADDRESS_BITS
                    del size_at[address], begin_of_end[address + whole]
                else:
                    address, whole = self._grow(at, size, streams[storage], is_small)
                rest = whole - size
                if rest > _MAX_SMALL or (rest and is_small):
                    begin = address + size
                    size_at[begin] = rest
                    begin_of_end[begin + rest] = begin
                    insort(keys, rest << _ADDRESS_BITS | begin)
                    whole = size
                addresses[storage] = address
                block_bytes[storage] = whole << _UNIT_BITS
            elif kind == _FREE:
                address, size = addresses[storage], block_bytes[storage] >> _UNIT_BITS
                keys = pools[streams[storage], num_bytes <= SMALL_BYTES]
                end = address + size
                begin = begin_of_end.pop(address, 0)
                if begin:
                    before = size_at.pop(begin)
                    del keys[bisect_left(keys, before << _ADDRESS_BITS | begin)]
                    address, size = begin, size + before
                after = size_at.pop(end, 0)
                if after:
                    del keys[bisect_left(keys, after << _ADDRESS_BITS | end)]
                    size += after
                size_at[address] = size
                begin_of_end[address + size] = address
                insort(keys, size << _ADDRESS_BITS | address)
            else:
                self._other(kind, at)

    def _other(self, kind: int, at: int) -> None:
        if kind == _EMPTY_CACHE:
            self._empty_cache(at)
        elif kind != _SYNCHRONIZE:
            raise BeyondPlain

    def _grow(self, at: int, size: int, stream: int, is_small: bool) -> tuple[int, int]:
        num_bytes = segment_bytes(size << _UNIT_BITS, self._large_bytes)
        if self._capacity_bytes is not None and self._reserved_bytes + num_bytes > self._capacity_bytes:
            raise BeyondPlain
        whole, address = num_bytes >> _UNIT_BITS, self._next_address
        self._next_address += whole + 1
        self._segments[address] = (whole, stream, is_small)
        self._reserved_bytes += num_bytes
        self.reserved.append((at, self._reserved_bytes))
        return address, whole

    def _empty_cache(self, at: int) -> None:
        for address, (whole, stream, is_small) in list(self._segments.items()):
            # Those of private pools have negative streams.
            if stream < 0 or self._size_at.get(address) != whole:
                continue
            keys = self._free[stream, is_small]
            del keys[bisect_left(keys, whole << _ADDRESS_BITS | address)]
            del self._size_at[address], self._begin_of_end[address + whole], self._segments[address]
            self._reserved_bytes -= whole << _UNIT_BITS
            self.num_returned += 1
        self.reserved.append((at, self._reserved_bytes))
