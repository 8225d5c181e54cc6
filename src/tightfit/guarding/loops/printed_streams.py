"""What a turn prints to stdout and stderr, so that a turn that is run again does not print it twice."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tightfit.guarding.loops.printed_text import PrintedText


class PrintedStreams:
    """The text that is printed to both streams."""

    def __init__(self) -> None:
        self._streams = (PrintedText(), PrintedText())

    def begin(self) -> None:
        """Text is noted from now on."""
        for printed, stream in zip(self._streams, (sys.stdout, sys.stderr), strict=True):
            printed.begin(stream)

    def end(self) -> None:
        """Nothing is noted any more."""
        for printed in self._streams:
            printed.end()

    def clear(self) -> dict[str, Any]:
        """A turn begins. Returns the streams that stand in place of those that text is printed to, by name."""
        for printed in self._streams:
            printed.clear()
        named = {"sys.stdout": sys.stdout, "sys.stderr": sys.stderr}
        return {name: s for name, s in named.items() if not any(printed.is_at(s) for printed in self._streams)}

    def stop(self) -> None:
        """The turn is over."""
        for printed in self._streams:
            printed.stop()

    def again(self) -> None:
        """The turn that is over is run again: what it has printed is not printed twice."""
        for printed in self._streams:
            printed.again()

    @contextmanager
    def not_noted(self) -> Iterator[None]:
        """What is printed within is not the turn's."""
        noted = [printed.set_noted(is_noted=False) for printed in self._streams]
        try:
            yield
        finally:
            for printed, is_noted in zip(self._streams, noted, strict=True):
                printed.set_noted(is_noted=is_noted)
