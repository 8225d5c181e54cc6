"""A progress line on the terminal, which disappears when the command is done."""

import sys
import time
from types import TracebackType
from typing import Self


class ProgressLine:
    """Rewrites one line on stderr, from two seconds on, and only where stderr is a terminal."""

    SILENT_SECONDS = 2.0
    INTERVAL_SECONDS = 0.5

    def __init__(self, label: str) -> None:
        self._label = label
        self._is_terminal = sys.stderr.isatty()
        self._next = time.monotonic() + self.SILENT_SECONDS
        self._is_shown = False

    def __enter__(self) -> Self:
        return self

    def __call__(self, what: str, share: float) -> None:
        """Shows that `share` of `what` is done, from 0 to 1."""
        now = time.monotonic()
        if self._is_terminal and now >= self._next:
            self._next = now + self.INTERVAL_SECONDS
            self._is_shown = True
            # \r goes back to the first column, ESC [K erases to the end of the line (ECMA-48, EL).
            print(f"\r\x1b[K{what} {self._label}: {share:.0%}", end="", file=sys.stderr, flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
