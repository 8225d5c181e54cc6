"""Signals that end a job (Ctrl-C, SIGTERM of a scheduler), handled by all ranks in the same place: where a forward pass begins.

A rank that leaves its loop a step earlier than the others, to save a checkpoint, has other weights than they have, or waits for them for ever. So what the program has set
for a signal is called when all ranks have met, on all of them; where they do not meet for a while (an evaluation), on each by itself.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_NUMBERS = (signal.SIGINT, signal.SIGTERM)
_PATIENCE_SECONDS = 5.0


class RankSignals:
    """The signals of this process. `taken` is called with the number of each that the program has a function for."""

    def __init__(self) -> None:
        self._own = self._note
        self._process = os.getpid()
        self._former: dict[int, Any] = {}
        # Those that have come and are not handled, and those that come later and are.
        self._pending: set[int] = set()
        self._handled: set[int] = set()
        self.taken: Callable[[int], None] = lambda _: None

    def before_meeting(self) -> int:
        """What is to be told the others: a bit for each signal that has come. What the program has set for a signal is taken down."""
        if threading.current_thread() is threading.main_thread():
            for number in _NUMBERS:
                former = signal.getsignal(number)
                # Without a function of the program's SIGTERM ends the process at once, as it should.
                if callable(former) and former != self._own:
                    self._former[number] = former
                    signal.signal(number, self._own)
                    self.taken(number)
        return sum(1 << number for number in self._pending)

    def after_meeting(self, come: int) -> None:
        """Handles those that have come to any rank."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in [number for number in self._former if come >> number & 1]:
            if number not in self._pending:
                # Its own is on the way.
                self._handled.add(number)
            self._handle(number, sys._getframe())

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            # A worker of a loader.
            self._former[number](number, frame)
        elif number in self._handled:
            self._handled.discard(number)
        elif number in self._pending:
            # A second one, or nobody has met.
            self._handle(number, frame)
        else:
            self._pending.add(number)
            waiting = threading.Timer(_PATIENCE_SECONDS, self._come_again, (number,))
            waiting.daemon = True
            waiting.start()

    def _come_again(self, number: int) -> None:
        if number in self._pending:
            signal.pthread_kill(threading.main_thread().ident or 0, number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._pending.discard(number)
        self._former[number](number, frame)
