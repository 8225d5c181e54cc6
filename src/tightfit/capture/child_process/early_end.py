"""Ends a trace from anywhere in it, a thread of the program too, with an error that has what was wanted of the program: the program cannot catch it."""

from collections.abc import Callable
from typing import NoReturn

from tightfit.errors import TightfitError

_ends: list[Callable[[TightfitError], NoReturn]] = []


def provide(end: Callable[[TightfitError], NoReturn]) -> None:
    """Has `end_with` call `end`, which ends the process with the error as its answer."""
    _ends.append(end)


def end_with(error: TightfitError) -> NoReturn:
    """Ends the process that traces with `error`, which the command that asked for the trace gets."""
    _ends[-1](error)
