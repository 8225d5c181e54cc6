"""What a turn prints to the terminal: where the turn is run again, text that was printed already is not printed twice."""

import io
from collections.abc import Callable
from typing import Any

from tightfit.guarding.loops.turn_threads import TurnThreads


class PrintedText:
    """Stands at the `write` of a stream, from `begin` to `end`. Text that the second run of a turn prints otherwise than the first is printed, and so is all behind it."""

    def __init__(self) -> None:
        self._threads = TurnThreads()
        self._stream: Any = None
        self._write: Callable[[str], int] = str.__len__
        self._printed: list[str] = []
        self._to_drop = ""
        # Printed by an attempt before the last one, which did not come so far.
        self._rest = ""
        self._is_noted = False

    def begin(self, stream: Any) -> None:
        """Text is noted from the next `clear` on. A stream that is no text file is left alone."""
        if isinstance(stream, io.TextIOWrapper):
            self._stream, self._write = stream, stream.write
            stream.write = self._print  # type: ignore[method-assign]

    def end(self) -> None:
        """Gives the stream its `write` back."""
        if self._stream is not None and vars(self._stream).get("write") == self._print:
            del self._stream.write
        self._stream = None

    def is_at(self, stream: Any) -> bool:
        """Whether it stands at this stream."""
        return self._stream is stream

    def clear(self) -> None:
        """A turn begins."""
        self._printed = []
        self._rest = ""
        self._is_noted = True

    def stop(self) -> None:
        """It is over."""
        if self._is_noted:
            self._is_noted, self._rest, self._to_drop = False, self._to_drop, ""

    def again(self) -> None:
        """The turn that is over is run again."""
        self._to_drop = "".join(self._printed) + self._rest

    def set_noted(self, *, is_noted: bool) -> bool:
        """Whether what is printed from now on is the turn's; returns what was so before."""
        before, self._is_noted = self._is_noted, is_noted
        return before

    def _print(self, text: str) -> int:
        if not self._is_noted or not isinstance(text, str) or not self._threads.is_here():
            return self._write(text)
        self._printed.append(text)
        if self._to_drop:
            expected = self._to_drop[: len(text)]
            if text.startswith(expected):
                self._to_drop = self._to_drop[len(text) :]
                rest = text[len(expected) :]
            else:
                self._to_drop, rest = "", text
            if rest:
                self._write(rest)
            return len(text)
        return self._write(text)
