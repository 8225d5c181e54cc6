"""Notes what a turn of the main thread does to the world outside of the process: files opened or written, directories changed, connections, processes.

Python's audit events say all but writes to files and connections that are open, and what is given to other threads (the writer of a logger, say):
those are noted at the files and connections that are opened from `begin` on, and at the methods that give. What is printed to the terminal is no
such effect: a turn that is run again prints the same text, which is dropped.
"""

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tightfit.guarding.loops.printed_streams import PrintedStreams
from tightfit.guarding.loops.turn_threads import TurnThreads
from tightfit.torch_hooks.audit_events import on_audit_events
from tightfit.torch_hooks.library_calls import LibraryCallOwner, on_library_calls

_EVENTS = {
    "os.remove": "removed a file",
    "os.rename": "renamed a file",
    "os.truncate": "truncated a file",
    "os.mkdir": "made a directory",
    "os.rmdir": "removed a directory",
    "os.link": "made a link",
    "os.symlink": "made a link",
    "os.system": "ran a command",
    "subprocess.Popen": "started a process",
    "socket.connect": "opened a connection",
    "socket.sendto": "sent a message",
    "sqlite3.connect": "opened a database",
}
_HEARD = frozenset({*_EVENTS, "open"})
# Of modules that are imported late Python writes the compiled code.
_OF_PYTHON = "__pycache__"


class OutsideEffects(LibraryCallOwner):
    """The first effect since `clear`, in words; empty if there was none."""

    def __init__(self) -> None:
        self.first = ""
        self._is_on = False
        self._threads = TurnThreads()
        self.printed = PrintedStreams()
        self._leave: list[Callable[[], object]] = []

    def begin(self) -> None:
        """Effects are noted from now on, until `end` or until this object is collected."""
        if self._is_on:
            return
        self._is_on = True
        self.printed.begin()
        self._leave = [on_library_calls(self), on_audit_events(self, _HEARD)]

    def end(self) -> None:
        """Nothing is noted any more."""
        self._is_on = False
        self.printed.end()
        while self._leave:
            self._leave.pop()()

    def clear(self) -> dict[str, Any]:
        """A turn begins: what was noted is forgotten. Returns the streams that stand in place of those that text is printed to, by name."""
        self.first = ""
        return self.printed.clear()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """What happens within is not the turn's."""
        first = self.first
        try:
            with self.printed.not_noted():
                yield
        finally:
            self.first = first

    def _note(self, what: str) -> None:
        if self._is_on and not self.first and self._threads.is_here():
            self.first = what

    def heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        """An audit event of Python's."""
        if event == "open":
            path, mode, flags = arguments
            # Python's own `open` gives flags that say how.
            is_written = (
                bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))
                if isinstance(flags, int)
                else "r" not in str(mode)
            )
            if is_written and not _is_harmless(path):
                self._note(f"opened {_name(path)} to write to it")
        elif not (arguments and _is_harmless(arguments[0])):
            self._note(_EVENTS[event])

    def gives(self, what: str) -> None:
        """Something is given to another thread or process."""
        self._note(what)

    def opened(self, file: Any, opened: Any) -> None:
        """A file is open: writes to it are noted."""
        if opened.writable() and not _is_harmless(file):
            opened.write = _counted(
                weakref.ref(opened), type(opened).write, lambda: self._note(f"wrote to {_name(file)}")
            )

    def connected(self, connection: Any) -> None:
        """A database is open: statements are noted, unless the program sets a callback of its own for them."""
        connection.set_trace_callback(lambda statement: self._note("ran a statement in a database"))


def _counted(
    reference: "weakref.ref[Any]", write: Callable[..., int], note: Callable[[], None]
) -> Callable[[Any], int]:
    def counted(data: Any) -> int:
        note()
        return write(reference(), data)

    return counted


def _is_harmless(path: Any) -> bool:
    text = os.fsdecode(path) if isinstance(path, str | bytes) else str(path)
    return _OF_PYTHON in text or text.startswith("/dev/")


def _name(path: Any) -> str:
    return "a file" if isinstance(path, int) else os.fsdecode(path)
