"""Feeds the events of a tape to a simulated allocator."""

from collections.abc import Sequence

from tightfit.allocator.caching import Block, CachingAllocator
from tightfit.tape import EventKind


class TapeReplay:
    """Maps each live storage of a tape to its block."""

    def __init__(self, allocator: CachingAllocator) -> None:
        self.allocator = allocator
        self.blocks: dict[int, Block] = {}

    def feed(self, kind: int, storage: int, num_bytes: Sequence[int], streams: Sequence[int], value: int) -> None:
        """One event; `num_bytes` and `streams` are indexed by storage."""
        if kind == EventKind.ALLOCATE:
            self.blocks[storage] = self.allocator.malloc(num_bytes[storage], streams[storage])
        elif kind == EventKind.FREE:
            self.allocator.free(self.blocks.pop(storage))
        # A kernel of another stream used the storage: the tape's form of Tensor.record_stream.
        elif kind == EventKind.USE:
            self.blocks[storage].record_stream(value)
        elif kind == EventKind.SYNCHRONIZE:
            self.allocator.synchronize()
        else:
            self.allocator.empty_cache()
