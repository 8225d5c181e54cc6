"""The free ranges of a memory from which parts are handed out: first fit, and neighbours are merged when they come back."""

import bisect


class FreeRanges:
    """Ranges `(begin, end)` of `num_bytes`, all free at first. What is taken is rounded up to multiples of `alignment`."""

    def __init__(self, num_bytes: int, *, alignment: int) -> None:
        self._alignment = alignment
        # In order and apart from each other.
        self._free: list[tuple[int, int]] = [(0, num_bytes)] if num_bytes else []

    @property
    def num_bytes(self) -> int:
        """The bytes of all free ranges."""
        return sum(end - begin for begin, end in self._free)

    def rounded(self, num_bytes: int) -> int:
        """What a range for `num_bytes` takes."""
        return -(-num_bytes // self._alignment) * self._alignment

    def take(self, num_bytes: int) -> tuple[int, int] | None:
        """The first range for `num_bytes`; None if no free range is large enough."""
        size = self.rounded(num_bytes)
        at = next((at for at, (begin, end) in enumerate(self._free) if end - begin >= size), None)
        if at is None:
            return None
        begin, end = self._free[at]
        if begin + size == end:
            del self._free[at]
        else:
            self._free[at] = (begin + size, end)
        return begin, begin + size

    def give_back(self, begin: int, end: int) -> None:
        """A range that was taken, or that is new, is free."""
        at = bisect.bisect(self._free, (begin, end))
        if at < len(self._free) and self._free[at][0] == end:
            end = self._free.pop(at)[1]
        if at and self._free[at - 1][1] == begin:
            at -= 1
            begin = self._free.pop(at)[0]
        self._free.insert(at, (begin, end))
