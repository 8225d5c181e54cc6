"""Standard input of a traced program: empty, since a plan traces the program many times; that the program asked for it is noted."""

import io
import sys
from collections.abc import Callable

from tightfit.errors.program_errors import NO_STDIN


class _Nothing(io.RawIOBase):
    """A file without a byte that calls `asked` when it is read."""

    was_read = False

    def __init__(self, asked: Callable[[], None]) -> None:
        super().__init__()
        self._asked = asked

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 0

    def isatty(self) -> bool:
        return False

    def readinto(self, _: object) -> int:
        _Nothing.was_read = True
        self._asked()
        return 0


def install(asked: Callable[[], None]) -> None:
    """Puts an empty file in place of `sys.stdin`."""
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(
        io.BufferedReader(_Nothing(asked)), encoding="utf-8", line_buffering=True
    )


def hint() -> str:
    """What is to be said with an error of a program that has read from it; empty for one that has not."""
    return f"; {NO_STDIN}" if _Nothing.was_read else ""
