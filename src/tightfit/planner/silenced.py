"""Makes an object of a library that prints when it is made, and cannot be told otherwise."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import TypeVar

Made = TypeVar("Made")
_STDOUT = 1


def made_silently(make: Callable[[], Made]) -> Made:
    """The result of `make`, while what code in C writes to stdout goes nowhere.

    HiGHS 1.16 prints its licence there when the first solver of a process is made, before any option can be set; stdout is where answers go, as JSON
    too.
    """
    try:
        kept = os.dup(_STDOUT)
    except OSError:  # the process has none
        return make()
    _flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, _STDOUT)
        made = make()
        _flush()
        return made
    finally:
        os.dup2(kept, _STDOUT)
        os.close(kept)
        os.close(nowhere)


def _flush() -> None:
    """Writes what C's streams hold: it belongs where stdout led when it was printed."""
    if os.name == "posix":
        ctypes.CDLL(None).fflush(None)
