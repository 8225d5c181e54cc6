"""Chooses how many examples of a batch go through forward and backward pass at once, from what smaller parts have held. No torch.

A size is tried only where what was measured says that it fits: from one example on, at most twice the largest size so far, along a line through the two
largest. Of another length of the examples (elements per example) a longer one is an upper bound, and a shorter one is taken to grow with the square of
the length, as attention does.
"""

import dataclasses
import statistics

_MARGIN = 1.05
# A size that is so much larger is worth another measurement, and one that is so much faster another size.
_MUCH = 1.1
_FASTER = 0.98
_TIMES = 2
# Sizes down to this part of the largest are timed a second time.
_NEAR = 4
# As those of plans.
_CALM_BATCHES, _MOST_CALM_BATCHES = 100, 6400


@dataclasses.dataclass(slots=True)
class _Measured:
    """What a part of some size has held beyond what was there before it, and its seconds per example each time."""

    num_bytes: int
    seconds: list[float]


class PartSizes:
    """Sizes of parts by the number of elements of an example."""

    def __init__(self) -> None:
        self._measured: dict[int, dict[int, _Measured]] = {}
        self._failed: dict[int, int] = {}
        self._num_good = 0
        self._calm_batches = _CALM_BATCHES
        self._is_after_calm = False

    def choose(self, num_left: int, *, num_elements: int, room_bytes: int | None) -> int:
        """The size of the next part, of a batch of which so many examples are left, whose examples have so many elements, with so much room; all where nothing counts it."""
        known = self._measured.get(num_elements, {})
        largest = self._largest(num_left, num_elements, room_bytes)
        if not known or largest > _MUCH * max(known):
            return largest
        again = [n for n, each in known.items() if largest <= _NEAR * n and n <= largest and len(each.seconds) < _TIMES]
        return max(again) if again else min(largest, self._fastest(known, largest))

    def note(self, size: int, *, num_elements: int, num_bytes: int, seconds: float) -> None:
        """A part of this size has run."""
        known = self._measured.setdefault(num_elements, {}).setdefault(size, _Measured(num_bytes, []))
        known.num_bytes = max(known.num_bytes, num_bytes)
        known.seconds.append(seconds / size)

    def is_settled(self, size: int, *, num_elements: int) -> bool:
        """Whether nothing is left to be learnt of this size."""
        known = self._measured.get(num_elements, {}).get(size)
        return known is not None and len(known.seconds) >= _TIMES

    def fail(self, size: int, *, num_elements: int) -> bool:
        """A part of this size had no room; whether a smaller one may."""
        self._failed[num_elements] = min(size, self._failed.get(num_elements, size))
        self._calm_batches = (
            min(_MOST_CALM_BATCHES, 2 * self._calm_batches) if self._is_after_calm else self._calm_batches
        )
        self._is_after_calm = False
        self._num_good = 0
        return size > 1

    def succeed(self) -> None:
        """A batch has run. After enough of them twice the size is tried again, later each time that this fails."""
        self._num_good += 1
        if self._failed and self._num_good >= self._calm_batches:
            self._failed = {elements: 2 * size for elements, size in self._failed.items()}
            self._is_after_calm = True
            self._num_good = 0

    def _largest(self, num_left: int, num_elements: int, room_bytes: int | None) -> int:
        known = self._measured.get(num_elements, {})
        most = 2 * max(known) if known else num_left
        failed = [size for elements, size in self._failed.items() if elements <= num_elements]
        most = min(num_left, most, *(max(1, size // 2) for size in failed))
        if room_bytes is None:
            return most
        size = most
        while size > 1:
            num_bytes = self._predicted(size, num_elements)
            if num_bytes is not None and _MARGIN * num_bytes <= room_bytes:
                return size
            # By tenths: prediction is cheap, and sizes need not be powers of two.
            size = min(size - 1, int(size / _MUCH))
        return 1

    def _predicted(self, size: int, num_elements: int) -> float | None:
        if num_elements in self._measured:
            return _along_line(self._measured[num_elements], size)
        bounds = [
            _along_line(known, size) * max(1.0, num_elements / elements) ** 2
            for elements, known in self._measured.items()
        ]
        return min(bounds, default=None)

    def _fastest(self, known: dict[int, _Measured], largest: int) -> int:
        # The first time of a size is that of its kernels' choice too.
        timed = {
            n: statistics.median(m.seconds[1:]) for n, m in known.items() if len(m.seconds) >= _TIMES and n <= largest
        }
        if not timed:
            return largest
        best = max(timed)
        for size in sorted(timed):
            if timed[size] < _FASTER * timed[best]:
                best = size
        return best


def _along_line(known: dict[int, _Measured], size: int) -> float:
    """The bytes of a part: on the line through the two nearest sizes below it, or in proportion where there is one."""
    if size in known:
        return known[size].num_bytes
    below = sorted(n for n in known if n < size)
    if not below:
        return known[min(known)].num_bytes
    if len(below) == 1:
        return known[below[0]].num_bytes * size / below[0]
    one, other = below[-2:]
    slope = (known[other].num_bytes - known[one].num_bytes) / (other - one)
    return known[other].num_bytes + max(0.0, slope) * (size - other)
