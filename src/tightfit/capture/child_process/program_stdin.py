"""Standard input of a traced program: the file that this process has there, read from where it is, for each trace anew. What is no file (a terminal, a
pipe) could be read once, and a plan traces the program many times: it is empty then, and that the program asked for it is noted.
"""

import io
import os
import stat
import sys
from collections.abc import Callable, Sequence
from typing import Any

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


def file_given() -> tuple[str, int] | None:
    """The file at the standard input of this process, and the position in it; None where it is none that a child can open."""
    try:
        found = os.fstat(0)
        if not stat.S_ISREG(found.st_mode):
            return None
        path = os.readlink("/proc/self/fd/0")
        return (path, os.lseek(0, 0, os.SEEK_CUR)) if os.path.samestat(found, os.stat(path)) else None
    except OSError:
        return None


def install(asked: Callable[[], None], given: Sequence[Any] | None) -> None:
    """Puts the file `given`, as `file_given` has it, in place of the standard input, or an empty one that calls `asked` when it is read."""
    if given is not None:
        path, position = given
        number = os.open(path, os.O_RDONLY)
        os.lseek(number, position, os.SEEK_SET)
        os.dup2(number, 0)
        os.close(number)
        sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))
        return
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(
        io.BufferedReader(_Nothing(asked)), encoding="utf-8", line_buffering=True
    )


def hint() -> str:
    """What is to be said with an error of a program that has read from it; empty for one that has not."""
    return f"; {NO_STDIN}" if _Nothing.was_read else ""
