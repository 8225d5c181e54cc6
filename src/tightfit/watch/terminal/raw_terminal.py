"""A terminal that gives single keys and shows a screen of its own, and is as it was afterwards, also while the process is stopped (Ctrl-Z)."""

import contextlib
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Self

from tightfit.watch.terminal.keys import KeyDecoder

_ESCAPE_SECONDS = 0.05
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[0m\x1b[?25h\x1b[?1049l"
_ASCII = str.maketrans("≤▲▼°…", "<^v'~")
_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


class RawTerminal:
    """The terminal of this process, as a context; for the main thread. `is_ended` is set by a signal that ends the process, or when the terminal is gone."""

    def __init__(self) -> None:
        self.is_ended = False
        self._input, self._output = sys.stdin.fileno(), sys.stdout.fileno()
        self._decoder = KeyDecoder()

    def __enter__(self) -> Self:
        self._settings = termios.tcgetattr(self._input)
        # Signals write into a pipe, so that whoever waits for keys wakes up.
        self._woken, wake = os.pipe()
        for end in (self._woken, wake):
            os.set_blocking(end, False)
        self._wake = wake
        self._old_wake = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        handlers = dict.fromkeys(_ENDING, self._end)
        handlers |= {signal.SIGWINCH: lambda *_: None, signal.SIGTSTP: self._stop}
        self._handlers = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        self._take()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._give_back()
        signal.set_wakeup_fd(self._old_wake)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        os.close(self._woken)
        os.close(self._wake)

    def size(self) -> tuple[int, int]:
        """Columns and lines. The environment's COLUMNS and LINES are of the moment at which the shell started the process."""
        with contextlib.suppress(OSError):
            columns, lines = os.get_terminal_size(self._output)
            if columns and lines:
                return columns, lines
        return 80, 24

    def write(self, text: str) -> None:
        """Writes to the terminal, with signs that its encoding does not have as others of the same width."""
        encoding = sys.stdout.encoding or "utf-8"
        data = (text if encoding.lower().startswith("utf") else text.translate(_ASCII)).encode(encoding, "replace")
        try:
            while data:
                data = data[os.write(self._output, data) :]
        except OSError:
            self.is_ended = True

    def keys(self, seconds: float) -> list[str]:
        """The keys that were pressed, waited for so long at most; none where a signal came first."""
        if not self._wait(seconds):
            return self._decoder.flush()
        keys = self._decoder.feed(self._read())
        # An escape sequence may come in two parts.
        if not keys and not self.is_ended:
            keys = self._decoder.feed(self._read()) if self._wait(_ESCAPE_SECONDS) else self._decoder.flush()
        return keys

    def _wait(self, seconds: float) -> bool:
        """Whether there are keys to be read."""
        try:
            ready, _, _ = select.select([self._input, self._woken], [], [], seconds)
        except OSError:
            self.is_ended = True
            return False
        if self._woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._woken, 4096)
        return self._input in ready

    def _read(self) -> bytes:
        try:
            data = os.read(self._input, 4096)
        except OSError:
            data = b""
        if not data:
            self.is_ended = True
        return data

    def _take(self) -> None:
        tty.setcbreak(self._input)
        self.write(_ENTER)

    def _give_back(self) -> None:
        self.write(_LEAVE)
        with contextlib.suppress(termios.error):
            termios.tcsetattr(self._input, termios.TCSADRAIN, self._settings)

    def _end(self, number: int, frame: FrameType | None) -> None:
        self.is_ended = True

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._give_back()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        # Here after SIGCONT.
        signal.signal(signal.SIGTSTP, self._stop)
        self._take()


def is_interactive() -> bool:
    """Whether this process has a terminal that can show a screen."""
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def frame(lines: Iterator[tuple[str, bool]]) -> str:
    """Lines as one write: each with whether it is as wide as the screen. Where it is, there is nothing to clear, and some terminals would clear its last sign."""
    return "\x1b[H" + "\r\n".join(text if is_full else f"{text}\x1b[K" for text, is_full in lines)
