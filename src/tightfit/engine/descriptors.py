"""Open files that are closed once nothing needs them any more: when the next one is opened, or a session ends."""

import os
import weakref
from collections import deque


class Descriptor:
    """A file that is open as `number`, for as long as this object lives."""

    __slots__ = ("__weakref__", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        # At its death the reference is appended, in C: in a callback of Python's an interrupt could be lost.
        note_death = _GONE.append
        _OPEN[weakref.ref(self, note_death)] = number


def close_gone() -> None:
    """Closes files of which nothing is needed any more, which gives the space of those without a name back."""
    while _GONE:
        os.close(_OPEN.pop(_GONE.popleft()))


_OPEN: dict["weakref.ref[Descriptor]", int] = {}
_GONE: deque["weakref.ref[Descriptor]"] = deque()
