"""One call of a block: which storages it has saved, and which of them are to leave the card."""

import dataclasses
import weakref
from collections import Counter

from tightfit.engine.saved.saved_storage import Place, SavedStorage

_ROUNDING = 1e-3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which storages of a call move: those of `smallest_bytes` or more, and where `counts` are given, pairs of bytes and a number, so many of each size; to the host,
    or `to_disk`.

    A call that has not saved those, as its batch is another, moves its largest up to the `share` of its bytes instead.
    """

    smallest_bytes: int = 1
    to_disk: bool = False
    counts: tuple[tuple[int, int], ...] = ()
    share: float = 1.0


class BlockCall:
    """What one call of a block saved, in order. Of a call without a `selection` only its border and its place in the order count.

    `previous` is the number of the call that ended before it began, `depth` in how many others it runs, `label` the technique that moves it.
    """

    def __init__(self, number: int, selection: Selection | None, *, previous: int, depth: int, label: str) -> None:
        self.number = number
        self.selection = selection
        self.previous = previous
        self.depth = depth
        self.label = label
        self.to_disk = selection is not None and selection.to_disk
        self.num_borders = 0
        self.is_reached = False
        """Whether the backward pass has come to it."""
        self._storages: list[weakref.ref[SavedStorage]] = []
        # How many of each size may still leave, none before that is settled at the end of the call; None: all.
        self._may_leave: Counter[int] | None = Counter() if selection is not None and selection.counts else None

    def add(self, storage: SavedStorage) -> None:
        """A storage that it is the first to save."""
        self._storages.append(weakref.ref(storage))

    def storages(self, place: Place) -> list[SavedStorage]:
        """Those that are still saved, and are at `place`."""
        living = [storage for reference in self._storages if (storage := reference()) is not None]
        return [storage for storage in living if storage.place is place]

    def select(self) -> bool:
        """Settles which sizes leave, from what the call has saved; whether these are the planned ones."""
        if self.selection is None or not self.selection.counts:
            return True
        there = Counter(storage.num_bytes for storage in self.storages(Place.CARD))
        planned = Counter(dict(self.selection.counts))
        is_as_planned = planned <= there
        self._may_leave = planned if is_as_planned else _largest(there, self.selection.share)
        return is_as_planned

    def may_leave(self, num_bytes: int) -> bool:
        """Whether one more storage of this size is to leave."""
        return self._may_leave is None or self._may_leave[num_bytes] > 0

    def left(self, num_bytes: int) -> None:
        """A storage of this size has left."""
        if self._may_leave is not None:
            self._may_leave[num_bytes] -= 1

    def close(self) -> int:
        """Lets no more leave. How many were to, and have not, as the program itself still had them."""
        if self._may_leave is None:
            return 0
        stayed, self._may_leave = self._may_leave.total(), Counter()
        return stayed

    @property
    def is_over(self) -> bool:
        """Whether nothing is saved of it any more."""
        return all(reference() is None for reference in self._storages)


def _largest(there: Counter[int], share: float) -> Counter[int]:
    """How many of each size to take of `there`, sizes in bytes with their numbers: the largest first, up to the `share` of all."""
    # What a share was rounded by.
    left = int(share * sum(size * number for size, number in there.items()) * (1 + _ROUNDING))
    taken: Counter[int] = Counter()
    for size in sorted(there, reverse=True):
        taken[size] = min(there[size], left // size)
        left -= taken[size] * size
    return taken
