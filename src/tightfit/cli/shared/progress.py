"""What a command is doing, on stderr: one line that is rewritten on a terminal, and one line each ten seconds in a pipe or a log.

A thread writes it, so that the seconds go on while the command computes; what is shown is what it was told last.
"""

import shutil
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

if TYPE_CHECKING:
    from tightfit.fit.planning_progress import Progress

_WAITING_SECONDS = 20.0
_MINUTE = 60


class ProgressLine:
    """Shows what a command is doing, from two seconds on. `label` names what it does, as `plan train.py`; `timeout_seconds` is that of its traces.

    `is_rewritten`: one line is rewritten; not where the program's own output goes to the same place.
    """

    SILENT_SECONDS = 2.0
    INTERVAL_SECONDS = 0.5
    INTERVAL_IN_A_PIPE = 10.0

    def __init__(
        self,
        label: str,
        *,
        timeout_seconds: float | None = None,
        is_rewritten: bool | None = None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._label = label
        self._timeout_seconds = timeout_seconds
        self._stream = stream or sys.stderr
        self._is_rewritten = self._stream.isatty() if is_rewritten is None else is_rewritten and self._stream.isatty()
        self._clock = clock
        self._started = clock()
        self._next = self._started + (self.SILENT_SECONDS if self._is_rewritten else self.INTERVAL_IN_A_PIPE)
        self._words = ""
        self._since = self._started
        self._is_shown = False
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._tick_on, daemon=True, name="tightfit-progress")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def report(self, progress: "Progress") -> None:
        """Takes in what is being done now."""
        self._set(progress_words(progress, self._timeout_seconds))

    def __call__(self, what: str, share: float) -> None:
        """Takes in that `share` of `what` is done, from 0 to 1."""
        self._set(f"{what}: {share:.0%}")

    def _set(self, words: str) -> None:
        self._words, self._since = words, self._clock()

    def tick(self) -> None:
        """Writes the line, if it is time for it."""
        now = self._clock()
        if now < self._next or not self._words:
            return
        self._next = now + (self.INTERVAL_SECONDS if self._is_rewritten else self.INTERVAL_IN_A_PIPE)
        line = f"{_clock_words(now - self._started)} {self._label}: {self._words}"
        if not self._is_rewritten:
            self._write(f"tightfit: {line}\n")
            return
        self._is_shown = True
        # \r goes back to the first column, ESC [K erases to the end of the line (ECMA-48, EL); a line that is wider than the terminal could not
        # be erased that way.
        self._write(f"\r\x1b[K{line[: max(1, shutil.get_terminal_size().columns - 1)]}")

    def _tick_on(self) -> None:
        while not self._is_over.wait(self.INTERVAL_SECONDS / 2):
            self.tick()

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        # Whoever read stderr has gone; the answer goes elsewhere.
        except (OSError, ValueError):
            self._is_over.set()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()
        if self._is_shown:
            self._write("\r\x1b[K")


def progress_words(progress: "Progress", timeout_seconds: float | None = None) -> str:
    """What is being done, how far it is, what was traced, and the best so far, separated by semicolons."""
    trace, parts = progress.trace, [progress.what]
    if trace is not None:
        # A step is counted when it is over; what is outside of steps (set-up, evaluation) has a name.
        if trace.span and not trace.span.startswith("step "):
            parts[0] += f", {trace.span}"
        if trace.num_steps:
            parts[0] += f", {trace.num_steps} {'step' if trace.num_steps == 1 else 'steps'} seen"
        if trace.num_operators:
            parts[0] += f", {trace.num_operators:,} operators"
        if trace.seconds_waiting >= _WAITING_SECONDS:
            since = f"no step since step {trace.num_steps}" if trace.num_steps else "no step yet"
            ends = f" (--timeout {timeout_seconds:g})" if timeout_seconds is not None else ""
            parts.append(f"{since}: {trace.place + ', ' if trace.place else ''}for {trace.seconds_waiting:.0f} s{ends}")
        elif progress.seconds_left is not None and progress.seconds_left >= 1:
            parts.append(f"about {progress.seconds_left:.0f} s more")
    if progress.num_traced:
        parts.append(f"{progress.num_traced} {'run' if progress.num_traced == 1 else 'runs'} traced")
    if progress.best:
        parts.append(f"best so far {progress.best}")
    return "; ".join(parts)


def _clock_words(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), _MINUTE)
    return f"{minutes}:{rest:02}"
