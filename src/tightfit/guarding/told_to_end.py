"""The signal with which a scheduler ends a job (SIGTERM), told at the border of a step: in its middle weights and states are of two steps."""

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from tightfit.errors import UsageError


class ToldToEnd:
    """Calls `on_terminate` at the next border after the signal has come, once for each time; without one, what the program has set for it.

    Between `begin` and `end` the signal does nothing else. What the program sets meanwhile stays.
    """

    def __init__(self, on_terminate: Callable[[], object] | None = None) -> None:
        self._on_terminate = on_terminate
        self._is_told = False
        self._is_taken = False
        # None for one that is no function of Python's.
        self._former: Any = None
        self._own = self._note

    def begin(self) -> None:
        """Takes the signal.

        Raises:
            UsageError: there is an `on_terminate`, and this is not the main thread.
        """
        if threading.current_thread() is not threading.main_thread():
            if self._on_terminate is not None:
                raise UsageError("on_terminate needs the main thread: Python handles signals there alone")
            return
        former = signal.getsignal(signal.SIGTERM)
        # Without a function of the program's the signal ends the process at once, as it should.
        if former is not self._own and (self._on_terminate is not None or callable(former)):
            self._is_taken, self._former = True, former
            signal.signal(signal.SIGTERM, self._own)

    def end(self) -> None:
        """Gives the signal back, and tells what has not been told."""
        if self._is_taken:
            former, self._is_taken, self._former = self._former, False, None
            if signal.getsignal(signal.SIGTERM) is self._own:
                # One that was set from C cannot be put back: the process ends at the signal then, as without any.
                signal.signal(signal.SIGTERM, signal.SIG_DFL if former is None else former)
            if self._on_terminate is None:
                self._tell(lambda: former(signal.SIGTERM, sys._getframe()))

    def at_border(self) -> None:
        """A step is over."""
        if self._on_terminate is not None:
            self._tell(self._on_terminate)

    def _tell(self, call: Callable[[], object]) -> None:
        if self._is_told:
            self._is_told = False
            call()

    def _note(self, number: int, frame: FrameType | None) -> None:
        # A handler runs between any two instructions.
        self._is_told = True
