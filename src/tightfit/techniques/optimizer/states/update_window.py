"""In which order the states of an optimizer come to the card and leave it again, within a window of bytes: one rule for what runs and for what predicts.

While one parameter is updated, the states of the next come and those of the last leave, so that both directions of the link are busy. What has left is
waited for only where its memory is needed for what comes next.
"""

import dataclasses
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Literal, final

# Beyond so many parameters whose states are under way, nothing is waited for to bring more.
_AHEAD = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StateMove:
    """The states of the parameter at the place `index` begin to come, begin to leave, or have left: their memory is waited for and freed."""

    kind: Literal["come", "leave", "left"]
    index: int


@final
class UpdateWindow:
    """`sizes` are the bytes of the states of each parameter in the order of the updates. At most `window_bytes` are on the card, or one parameter's."""

    def __init__(self, sizes: Sequence[int], window_bytes: int) -> None:
        self._sizes = sizes
        self._window_bytes = window_bytes
        self._next = 0
        self._leaving: deque[int] = deque()
        self.bytes_on_card = 0
        """What comes, is there, or leaves."""

    def begin(self) -> Iterator[StateMove]:
        """The moves once the order is known, before anything is updated."""
        while self._next < min(len(self._sizes), 1 + _AHEAD) and self._has_room(self._sizes[self._next]):
            yield self._come()

    def before(self, index: int) -> Iterator[StateMove]:
        """The moves before the update at the place `index`, which are called for in order."""
        if index < self._next:
            return
        while self._leaving and not self._has_room(self._sizes[index]):
            yield self._left()
        yield self._come()

    def after(self, index: int) -> Iterator[StateMove]:
        """The moves after that update."""
        self._leaving.append(index)
        yield StateMove(kind="leave", index=index)
        while self._next < len(self._sizes):
            size = self._sizes[self._next]
            # The next update must not wait for what this one has only just sent off.
            while self._next <= index + _AHEAD and len(self._leaving) > 1 and not self._has_room(size):
                yield self._left()
            if not self._has_room(size):
                return
            yield self._come()

    def end(self) -> Iterator[StateMove]:
        """The moves after the last update."""
        while self._leaving:
            yield self._left()

    def _has_room(self, size: int) -> bool:
        return self.bytes_on_card + size <= self._window_bytes

    def _come(self) -> StateMove:
        self.bytes_on_card += self._sizes[self._next]
        self._next += 1
        return StateMove(kind="come", index=self._next - 1)

    def _left(self) -> StateMove:
        index = self._leaving.popleft()
        self.bytes_on_card -= self._sizes[index]
        return StateMove(kind="left", index=index)
