"""torch's allocator of pinned host memory (ATen/core/CachingHostAllocator.h), as bytes.

Each request is rounded up to a power of two, blocks that are freed are kept for requests of the same power, and nothing goes back to the system by itself: 5 GiB
of buffers may hold 8 GiB, for good. A block whose copies are still under way is not reused by torch; here time does not pass, and it is.
"""

from collections import Counter


class PinnedHostAllocator:
    """The blocks in use, and those that are kept for the next request."""

    def __init__(self) -> None:
        self.reserved_bytes = 0
        self.peak_reserved_bytes = 0
        self.requested_bytes = 0
        self.peak_requested_bytes = 0
        self._free: Counter[int] = Counter()

    def malloc(self, num_bytes: int) -> None:
        """A request, which takes a free block of its power of two or a new one."""
        block = rounded(num_bytes)
        if self._free[block]:
            self._free[block] -= 1
        else:
            self.reserved_bytes += block
        self.requested_bytes += num_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        self.peak_requested_bytes = max(self.peak_requested_bytes, self.requested_bytes)

    def free(self, num_bytes: int) -> None:
        """The end of a request of this size."""
        if num_bytes:
            self._free[rounded(num_bytes)] += 1
        self.requested_bytes -= num_bytes

    def empty_cache(self) -> None:
        """Gives what is not in use back to the system (`torch.accelerator.memory.empty_host_cache`)."""
        self.reserved_bytes -= sum(block * number for block, number in self._free.items())
        self._free.clear()


def rounded(num_bytes: int) -> int:
    """The block of a request: the next power of two; 0 for none."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0
