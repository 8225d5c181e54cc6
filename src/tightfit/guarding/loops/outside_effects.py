"""Notes what a turn of the main thread does to the world outside of the process: files opened or written, directories changed, connections, processes.

Python's audit events say all but writes to files and connections that are open, and what is given to other threads (the writer of a logger, say) or
processes, or taken from them: those are noted at the files and connections that are opened from `begin` on, and at the methods that give. What is printed
to the terminal is no such effect: a turn that is run again prints the same text, which is dropped. Neither is the work that libraries do for themselves:
a data loader that begins anew starts its workers anew, and a compiler finds its cache.
"""

import os
import re
import signal
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tightfit.guarding.loops.printed_streams import PrintedStreams
from tightfit.guarding.loops.turn_processes import TurnProcesses
from tightfit.guarding.loops.turn_threads import TurnThreads
from tightfit.torch_hooks.audit_events import on_audit_events
from tightfit.torch_hooks.library_calls import (
    GAVE_TO_PROCESS,
    GAVE_TO_THREAD,
    STARTED_THREAD,
    TOOK_FROM_PROCESS,
    TOOK_FROM_THREAD,
    LibraryCallOwner,
    on_library_calls,
)

_STARTED_PROCESS = "started a process"
_SIGNALLED = "sent a signal"
_EVENTS = {
    "os.remove": "removed a file",
    "os.rename": "renamed a file",
    "os.truncate": "truncated a file",
    "os.mkdir": "made a directory",
    "os.rmdir": "removed a directory",
    "os.link": "made a link",
    "os.symlink": "made a link",
    "os.system": "ran a command",
    "os.fork": _STARTED_PROCESS,
    "os.forkpty": _STARTED_PROCESS,
    "os.posix_spawn": _STARTED_PROCESS,
    "os.spawn": _STARTED_PROCESS,
    "os.exec": "ran another program",
    "os.chdir": "changed the working directory",
    "os.chmod": "changed the rights of a file",
    "os.chown": "changed the owner of a file",
    "os.utime": "changed the times of a file",
    "os.setxattr": "changed the attributes of a file",
    "os.removexattr": "changed the attributes of a file",
    "os.kill": _SIGNALLED,
    "os.killpg": _SIGNALLED,
    "signal.pthread_kill": _SIGNALLED,
    "subprocess.Popen": _STARTED_PROCESS,
    "socket.connect": "opened a connection",
    "socket.sendto": "sent a message",
    "socket.sendmsg": "sent a message",
    "sqlite3.connect": "opened a database",
}
_HEARD = frozenset({*_EVENTS, "open"})
# The frames between an effect and what notes it.
_WATCHES = (__name__, "tightfit.torch_hooks.audit_events", "tightfit.torch_hooks.library_calls")
_FOR_THEMSELVES = re.compile(
    r"(torch\._(inductor|dynamo)|torch\.multiprocessing\.reductions|tqdm\._monitor|triton|tightfit)(\.|$)"
)
_LOADER = re.compile(r"torch\.utils\.data\.(dataloader|_utils)(\.|$)")
# Of a worker that is not forked it is not known whether it reaches outside.
_OF_LOADERS = frozenset(
    [_STARTED_PROCESS, STARTED_THREAD, GAVE_TO_THREAD, GAVE_TO_PROCESS, TOOK_FROM_THREAD, TOOK_FROM_PROCESS]
)
# Of modules that are imported late Python writes the compiled code.
_OF_PYTHON = "__pycache__"


class OutsideEffects(LibraryCallOwner):
    """Notes the first effect since `clear`."""

    def __init__(self) -> None:
        self._first = ""
        self._newest: Any = None
        self._is_on = False
        self._threads = TurnThreads()
        self._processes = TurnProcesses()
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
        self._newest = None
        self.printed.end()
        while self._leave:
            self._leave.pop()()

    def clear(self) -> dict[str, Any]:
        """A turn begins: what was noted is forgotten. Returns the streams that stand in place of those that text is printed to, by name."""
        self._first = ""
        self._newest = None
        self._processes.begin()
        return self.printed.clear()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """What happens within is not the turn's."""
        first = self._first
        try:
            with self.printed.not_noted():
                yield
        finally:
            self._first = first

    @property
    def first(self) -> str:
        """The first effect since `clear`, in words; empty if there was none."""
        by_others = "started a process that reaches outside of it" if self._processes.has_noted() else ""
        return self._first or by_others

    def _note(self, what: str) -> None:
        if not self._is_on or self._first or not self._threads.is_here() or _is_of_a_library(what, sys._getframe(1)):
            return
        if self._processes.is_here():
            self._first = what
        else:
            self._processes.note()

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
        elif event == "os.kill" and arguments in ((os.getpid(), signal.SIGTERM), (arguments[0], 0)):
            # What is done at the first waits for the end of the turn (`ToldToEnd`); the second asks whether a process is there.
            pass
        elif not (arguments and _is_harmless(arguments[0])):
            self._note(_EVENTS[event])

    def gives(self, what: str) -> None:
        """Something is given to another thread or process."""
        self._note(what)

    def opened(self, file: Any, opened: Any) -> None:
        """A file is open: writes to it are noted."""
        if opened.writable() and not _is_harmless(file):
            reference = weakref.ref(opened)
            # `open(...).write(...)` lets go of the file before it calls the method that it found: here is who holds it until then.
            self._newest = opened

            def write(data: Any) -> int:
                self._note(f"wrote to {_name(file)}")
                written: Any = reference()
                if self._newest is written:
                    self._newest = None
                return type(written).write(written, data)

            opened.write = write

    def connected(self, connection: Any) -> None:
        """A database is open: statements are noted, unless the program sets a callback of its own for them."""
        connection.set_trace_callback(lambda statement: self._note("ran a statement in a database"))


def _is_of_a_library(what: str, frame: types.FrameType | None) -> bool:
    """Whether an effect is the work of a library for itself: of the frames outside of Python's library the innermost decides."""
    while frame is not None:
        module = frame.f_globals.get("__name__") or ""
        root = module.partition(".")[0]
        if module == "multiprocessing.util" and frame.f_code.co_name == "_exit_function":
            # A process that ends removes what it has made for itself.
            return True
        if module not in _WATCHES and (root not in sys.stdlib_module_names or root == "__main__"):
            if _LOADER.match(module):
                return what in _OF_LOADERS
            return _FOR_THEMSELVES.match(module) is not None
        frame = frame.f_back
    return False


def _is_harmless(path: Any) -> bool:
    text = os.fsdecode(path) if isinstance(path, str | bytes) else str(path)
    return _OF_PYTHON in text or text.startswith("/dev/")


def _name(path: Any) -> str:
    return "a file" if isinstance(path, int) else os.fsdecode(path)
