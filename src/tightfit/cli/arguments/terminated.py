"""SIGTERM: a command closes what it has open (temporary folders, the traced program), says one line, and ends as the signal ends a process."""

import contextlib
import functools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType

_masks: list[set[int]] = []


class Terminated(BaseException):
    """The process was told to end; a BaseException, so that only contexts are left on its way."""


def close_first() -> None:
    """From now on SIGTERM raises `Terminated`, once. A handler that is there, or that the signal is ignored, is somebody's decision."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _told)
        _look_after_forks()


def _told(_number: int, _frame: FrameType | None) -> None:
    # A second one ends the process, whatever it is doing.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise Terminated


_handlers: list[Callable[[int, FrameType | None], None]] = [_told]


@functools.cache
def _look_after_forks() -> None:
    if sys.platform != "win32":
        os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_release_as_under_python)


def _hold() -> None:
    """Holds the signal back around a fork: Python forgets those that a handler of its own has not been called for in the child, which would go on."""
    if signal.getsignal(signal.SIGTERM) in _handlers:
        _masks.append({int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})})


def _release() -> None:
    if _masks:
        signal.pthread_sigmask(signal.SIG_SETMASK, _masks.pop())


def _release_as_under_python() -> None:
    """What a program of the user's has forked is not the command, has nothing to close, and ends by the signal."""
    if _masks:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, _masks.pop())


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


@contextlib.contextmanager
def with_last_words(say: Callable[[FrameType | None], None]) -> Iterator[None]:
    """The same, but `say` is called first with the frame where the program is."""

    def last_words(_number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        say(frame)
        sys.stderr.flush()
        signal.raise_signal(signal.SIGTERM)

    is_ours = signal.getsignal(signal.SIGTERM) is _told
    if is_ours:
        # Nothing is raised: what the program does when it is left would be done twice, or where plain python would not do it.
        _handlers.append(last_words)
        signal.signal(signal.SIGTERM, last_words)
    try:
        yield
    finally:
        if is_ours and signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, last_words):
            signal.signal(signal.SIGTERM, _told)
        if is_ours:
            _handlers.remove(last_words)
