"""A sequence that does not keep its items alive; those that died are left out."""

import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class WeakSequence(Generic[T]):
    """Items in the order in which they were appended."""

    def __init__(self) -> None:
        self._references: list[weakref.ref[T]] = []

    def append(self, item: T) -> None:
        """Adds `item` at the end."""
        self._references.append(weakref.ref(item))

    def __iter__(self) -> Iterator[T]:
        for reference in self._references:
            item = reference()
            if item is not None:
                yield item

    def __bool__(self) -> bool:
        return any(True for _ in self)
