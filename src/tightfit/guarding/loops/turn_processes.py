"""Processes that are forked while a turn runs, such as the workers of a data loader that begins in it: whether what they run reaches outside too."""

import mmap
import os

_NUM_BYTES = 8


class TurnProcesses:
    """Of the process in which this is made. One that is forked belongs to the turn in which it was, and tells by memory that both have."""

    def __init__(self) -> None:
        self._own = os.getpid()
        self._turn = 0
        self._last = mmap.mmap(-1, _NUM_BYTES)

    def begin(self) -> None:
        """A turn begins."""
        self._turn += 1

    def is_here(self) -> bool:
        """Whether the caller runs in the process itself."""
        return os.getpid() == self._own

    def note(self) -> None:
        """In a forked process: it reaches outside."""
        self._last[:] = self._turn.to_bytes(_NUM_BYTES, "little")

    def has_noted(self) -> bool:
        """Whether one that was forked in this turn has reached outside."""
        return int.from_bytes(self._last[:], "little") == self._turn
