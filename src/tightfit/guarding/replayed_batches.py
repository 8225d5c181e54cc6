"""Batches for steps that may be run twice: what was handed out in a step that failed is handed out again."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

Batch = TypeVar("Batch")


class ReplayedBatches(Iterator[Batch], Generic[Batch]):
    """An iterator over `batches` that hands out its items since the last `begin` once more after `again`."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        self._batches: Iterator[Batch] = iter(batches)
        self._given: list[Batch] = []
        self._waiting: deque[Batch] = deque()

    def __iter__(self) -> "ReplayedBatches[Batch]":
        return self

    def __next__(self) -> Batch:
        batch: Any = self._waiting.popleft() if self._waiting else next(self._batches)
        self._given.append(batch)
        return batch

    def begin(self) -> None:
        """A step begins: what was handed out before is let go."""
        self._given.clear()

    def again(self) -> None:
        """The step failed: its batches come again, in their order."""
        self._waiting.extendleft(reversed(self._given))
        self._given.clear()
