"""Standard input of a rank: reading it is refused, since what one rank reads the others would not. An empty one would be taken for the program's data."""

import io
import sys
from collections.abc import Callable
from typing import Never

WHY = "it reads standard input, which only one process could: give it what it reads in a file or as an argument"


class _Refused(io.RawIOBase):
    def __init__(self, refuse: Callable[[str], Exception]) -> None:
        super().__init__()
        self._refuse = refuse

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 0

    def isatty(self) -> bool:
        return False

    def readinto(self, _: object) -> Never:
        raise self._refuse(WHY)


def refuse_input(refuse: Callable[[str], Exception]) -> None:
    """From now on reading `sys.stdin` raises what `refuse` makes."""
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.BufferedReader(_Refused(refuse)), encoding="utf-8")
