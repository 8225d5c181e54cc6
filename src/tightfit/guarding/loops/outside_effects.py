"""Notes what the main thread does to the world outside of the process: files opened or written, directories changed, connections, processes.

Python's audit events say all but writes to files that are open: those are counted by the files that `open` returns from `begin` on.
What is printed to the standard output is no such effect: a turn that is run again prints the same text, which is dropped.
"""

import builtins
import io
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

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
# Of modules that are imported late Python writes the compiled code.
_OF_PYTHON = "__pycache__"


class OutsideEffects:
    """The first effect since `clear`, in words; empty if there was none."""

    def __init__(self) -> None:
        self.first = ""
        self._is_on = False
        self._thread = threading.get_ident()
        self._open = builtins.open
        self._printed: list[str] = []
        self._to_drop = ""
        self._is_attempt = False

    def begin(self) -> None:
        """Effects are noted from now on. An audit hook stays for the life of the process; it is silent after `end`."""
        self._is_on = True
        sys.addaudithook(self._heard)
        builtins.open = io.open = self._opened
        self._write = sys.stdout.write
        sys.stdout.write = self._print  # type: ignore[method-assign]

    def end(self) -> None:
        """Nothing is noted any more."""
        self._is_on = False
        builtins.open = io.open = self._open
        if vars(sys.stdout).get("write") == self._print:
            del sys.stdout.write

    def clear(self) -> None:
        """An attempt begins: what was noted is forgotten."""
        self.first = ""
        self._printed = []
        self._is_attempt = True

    def stop(self) -> None:
        """It is over."""
        self._is_attempt = False
        self._to_drop = ""

    def again(self) -> None:
        """The attempt that is over is made again: what it has printed is not printed twice."""
        self._to_drop = "".join(self._printed)

    def _print(self, text: str) -> int:
        if not self._is_attempt or threading.get_ident() != self._thread or not isinstance(text, str):
            return self._write(text)
        self._printed.append(text)
        if self._to_drop:
            rest = text.removeprefix(self._to_drop[: len(text)])
            # Another text than the first time: it is printed, and so is all that follows.
            self._to_drop = self._to_drop[len(text) :] if len(rest) < len(text) else ""
            if rest:
                self._write(rest)
            return len(text)
        return self._write(text)

    def _note(self, what: str) -> None:
        if self._is_on and not self.first and threading.get_ident() == self._thread:
            self.first = what

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._is_on:
            return
        if event == "open":
            path, mode, flags = arguments
            # Python's own `open` gives flags that say how.
            is_written = bool(flags & (os.O_WRONLY | os.O_RDWR)) if isinstance(flags, int) else "r" not in str(mode)
            if is_written and not _is_harmless(path):
                self._note(f"opened {_name(path)} to write to it")
        elif event in _EVENTS and not (arguments and _is_harmless(arguments[0])):
            self._note(_EVENTS[event])

    def _opened(self, file: Any, *args: Any, **kwargs: Any) -> Any:
        opened = self._open(file, *args, **kwargs)
        if opened.writable() and not _is_harmless(file):
            opened.write = _counted(weakref.ref(opened), type(opened).write, lambda: self._note(f"wrote to {_name(file)}"))
        return opened


def _counted(reference: "weakref.ref[Any]", write: Callable[..., int], note: Callable[[], None]) -> Callable[[Any], int]:
    def counted(data: Any) -> int:
        note()
        return write(reference(), data)

    return counted


def _is_harmless(path: Any) -> bool:
    text = os.fsdecode(path) if isinstance(path, str | bytes) else str(path)
    return _OF_PYTHON in text or text.startswith("/dev/")


def _name(path: Any) -> str:
    return "a file" if isinstance(path, int) else os.fsdecode(path)
