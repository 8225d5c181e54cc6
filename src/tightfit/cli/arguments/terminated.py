"""SIGTERM: a command closes what it has open (temporary folders, the traced program), says one line, and ends as the signal ends a process."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType

_own_process: list[int] = []


class Terminated(BaseException):
    """The process was told to end; a BaseException, so that only contexts are left on its way."""


def close_first() -> None:
    """From now on SIGTERM raises `Terminated`, once. A handler that is there, or that the signal is ignored, is somebody's decision."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        _own_process[:] = [os.getpid()]
        signal.signal(signal.SIGTERM, _told)


def _told(_number: int, _frame: FrameType | None) -> None:
    # A second one ends the process, whatever it is doing.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # What a program of the user's has forked is not the command, and has nothing to close.
    if os.getpid() not in _own_process:
        signal.raise_signal(signal.SIGTERM)
    raise Terminated


def end(line: str = "terminated") -> None:
    """Says that the command was terminated, and ends this process by the signal: a shell sees 143."""
    sys.stderr.write(f"tightfit: {line}\n")
    sys.stderr.flush()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.raise_signal(signal.SIGTERM)


@contextlib.contextmanager
def as_under_python() -> Iterator[None]:
    """While a program of the user's runs in this process: SIGTERM ends it at once and silently, but for a handler of its own."""
    is_ours = signal.getsignal(signal.SIGTERM) is _told
    if is_ours:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        yield
    finally:
        if is_ours and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _told)
