"""Notices calls that leave something outside of the process's memory, or take something from there: files, folders, databases, sockets, queues, signals.

Code that is run again would do it once more, and nothing can put it back: a count in a file has moved on twice, whatever both runs compute. Calls are
seen by Python's profile function, in this thread and for as long as the region runs; a profiler of the program's that is written in Python is called
too. What is only printed or logged does not count, and neither does what Python's pools of threads hand on, or what libraries write for themselves
(torch's compiler has a cache of files).
"""

import io
import os
import re
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from tightfit.effects.users_code import is_users_file
from tightfit.errors import ApplyError

# Python modules all of whose functions work on what lies outside.
_MODULES = frozenset(
    [
        *("shelve", "dbm", "dbm.dumb", "sqlite3", "sqlite3.dbapi2", "mailbox", "subprocess"),
        *("multiprocessing.shared_memory", "multiprocessing.sharedctypes", "multiprocessing.connection"),
        *("multiprocessing.queues", "multiprocessing.managers", "multiprocessing.synchronize"),
        *("socket", "socketserver", "ssl", "http.client", "urllib.request", "ftplib", "smtplib", "xmlrpc.client"),
    ]
)
_LIBRARIES = frozenset(
    [
        *("diskcache", "h5py", "joblib", "lmdb", "peewee", "plyvel", "psycopg", "psycopg2", "pymongo", "redis"),
        *("requests", "sqlalchemy", "tables", "zarr", "zmq"),
    ]
)
# What writes for who calls it.
_WRITERS = ("torch.serialization", "numpy")
_OF_FILES = frozenset(["open", "truncate", "write", "writelines"])
# Functions of C, by the modules of the functions or of the methods' classes, without an underscore before them.
_BY_MODULE = {
    "posix": "chdir chmod copy_file_range fchdir fork ftruncate kill link lseek mkdir mkfifo open posix_spawn putenv pwrite pwritev read readv "
    "remove rename replace rmdir sendfile setxattr symlink system truncate umask unlink unsetenv utime write writev",
    "socket": "accept connect recv recv_into recvfrom recvfrom_into recvmsg send sendall sendmsg sendto",
    "io": " ".join(_OF_FILES),
    "sqlite3": "backup commit execute executemany executescript rollback",
    "queue": "get get_nowait put put_nowait",
    "mmap": "move read read_byte readline resize seek write write_byte",
    "gdbm": "open firstkey nextkey sync reorganize",
    "posixshmem": "shm_open shm_unlink",
    "posixsubprocess": "fork_exec",
    "multiprocessing": "acquire release",
    "ctypes": "from_address",
    "numpy": "tofile",
    # Handlers run in the main thread: on a card, where code is run again in one of torch's, after the backward pass. And none can be set there.
    "signal": "alarm pthread_kill raise_signal setitimer signal",
    "thread": "interrupt_main",
    # Settings of the whole process.
    "sys": "setrecursionlimit setswitchinterval",
}
_MODULES_OF: dict[str, set[str]] = defaultdict(set)
for _module, _names in _BY_MODULE.items():
    for _name in _names.split():
        _MODULES_OF[_name].add(_module)
# Under other names, besides those with an underscore.
_ALIASES = {"nt": "posix", "dbm": "gdbm"}
# Which threads of Python's own hand on work and results, what logs, and we ourselves.
_ALLOWED = re.compile(r"(concurrent\.futures|asyncio|logging|threading|multiprocessing\.pool|weakref|tightfit)(\.|$)")
_ONCE_MORE = "whose effect outside the process would be repeated"
_WRITES = re.compile(r"[rbt]{0,2}([wax][bt]?\+?[bt]?|\+[bt]?)$")

NAMES = frozenset(
    [
        *("open", "write", "writelines", "write_text", "write_bytes", "read_text", "read_bytes", "touch", "unlink"),
        *(
            "mkdir",
            "rmdir",
            "rename",
            "truncate",
            "execute",
            "executemany",
            "executescript",
            "commit",
            "send",
            "sendall",
        ),
        *("recv", "put", "put_nowait", "get_nowait", "tofile", "memmap", "putenv", "chdir", "system", "from_address"),
        *("os", "posix", "io", "pathlib", "Path", "sqlite3", "shelve", "dbm", "socket", "mmap", "tempfile", "shutil"),
        *(
            "signal",
            "interrupt_main",
            "setrecursionlimit",
            "setswitchinterval",
            "subprocess",
            "multiprocessing",
            "shared_memory",
            "queue",
            "SimpleQueue",
            "importlib",
            "getattr",
            "exec",
        ),
        *("eval", "__import__", "save", "dump", *_LIBRARIES),
    ]
)
"""What code names that may reach outside: where none of them is named, the look is left out where it would cost too much (on a card)."""


class OutsideCalls:
    """Inside of it, the first call in this thread that reaches outside: `found` says which, and where; empty if there is none."""

    def __init__(self) -> None:
        self.found = ""
        self._before: Any = None
        self._is_on = False

    def __enter__(self) -> Self:
        self._before = sys.getprofile()
        # One that is written in C cannot be put back.
        self._is_on = self._before is None or isinstance(self._before, types.FunctionType | types.MethodType)
        if self._is_on:
            sys.setprofile(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_on and sys.getprofile() == self._see:
            sys.setprofile(self._before)

    def _see(self, frame: types.FrameType, event: str, argument: Any) -> None:
        if self._before is not None:
            self._before(frame, event, argument)
        if self.found:
            return
        if event == "c_call":
            name = argument.__name__
            if name in _MODULES_OF and _reaches_outside(frame, argument, name) and not _is_allowed(frame):
                self.found = f"{name}{_where(frame)}"
        elif event == "call":
            module = frame.f_globals.get("__name__") or ""
            is_outside = (
                module in _MODULES or module.partition(".")[0] in _LIBRARIES or _is_saved_by_torch(frame, module)
            )
            if is_outside and not _is_allowed(frame):
                self.found = f"{module}{_where(frame)}"


class Unwatched:
    """Inside of it no calls are looked at: of torch's own code, of which none reaches outside, and a look at each call takes several times as long as the call.
    A profiler of the program's goes on."""

    __slots__ = ("_watch",)

    def __enter__(self) -> None:
        watch = sys.getprofile()
        of = getattr(watch, "__self__", None)
        self._watch = watch if isinstance(of, OutsideCalls) and of._before is None else None
        if self._watch is not None:
            sys.setprofile(None)

    def __exit__(self, *_: object) -> None:
        if self._watch is not None:
            sys.setprofile(self._watch)


@contextmanager
def without_outside_calls(refusal: Callable[[str], Exception], *, is_on: bool) -> Iterator[None]:
    """With `is_on`, raises `refusal` of a reason at the end of a block that has made a call that reaches outside."""
    if not is_on:
        yield
        return
    with OutsideCalls() as calls:
        try:
            yield
        except ApplyError as error:
            # Another refusal may let the block run again as a whole; what has been done outside says that it must not.
            if not calls.found:
                raise
            raise refusal(f"calls {calls.found}, {_ONCE_MORE}") from error
    if calls.found:
        raise refusal(f"calls {calls.found}, {_ONCE_MORE}")


def _where(frame: types.FrameType | None) -> str:
    """The line of the program's own code that a call comes from."""
    while frame is not None:
        if is_users_file(file := frame.f_code.co_filename):
            return f" at {Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _is_saved_by_torch(frame: types.FrameType, module: str) -> bool:
    """Whether torch saves to a path, which it opens and writes in C++ by classes, of whose calls Python tells nobody."""
    is_save = module == "torch.serialization" and frame.f_code.co_name == "save"
    return is_save and isinstance(frame.f_locals.get("f"), str | os.PathLike)


def _is_allowed(frame: types.FrameType | None) -> bool:
    """Whether the call is not the program's: of Python's own pools, a log, a library that keeps a cache, or the end of an object, which may come at any time."""
    while frame is not None:
        module = frame.f_globals.get("__name__") or ""
        root = module.partition(".")[0]
        if _ALLOWED.match(module) or frame.f_code.co_name == "__del__":
            return True
        # Of the frames outside of Python's library the innermost decides.
        if root not in sys.stdlib_module_names or root == "__main__":
            return not (is_users_file(frame.f_code.co_filename) or root in _LIBRARIES or module.startswith(_WRITERS))
        frame = frame.f_back
    return False


def _reaches_outside(frame: types.FrameType, function: Any, name: str) -> bool:
    owner = getattr(function, "__self__", None)
    # A function of a module has that module as its `__self__`.
    is_method = owner is not None and not isinstance(owner, types.ModuleType)
    kind = owner if isinstance(owner, type) else type(owner)
    modules = {base.__module__ for base in kind.__mro__} if is_method else {function.__module__}
    modules = {_ALIASES.get(each, each) for module in modules if (each := (module or "").lstrip("_"))} & _MODULES_OF[
        name
    ]
    if not modules:
        return False
    if name == "open":
        return "posix" in modules or _opens_to_write(frame)
    if name in _OF_FILES and isinstance(owner, io.IOBase):
        return not isinstance(owner, io.StringIO | io.BytesIO) and not _is_shown(owner)
    # `os.environ` is state that is put back.
    return not (name in ("putenv", "unsetenv") and frame.f_globals.get("__name__") == "os")


def _is_shown(file: Any) -> bool:
    """Whether a file is the terminal: what is printed again is no state."""
    shown = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    return any(file is each or file is getattr(each, "buffer", None) for each in shown if each is not None)


def _opens_to_write(frame: types.FrameType) -> bool:
    """Whether the code that opens a file names a mode that writes: arguments of functions in C are not shown."""
    mode = frame.f_locals.get("mode")
    given = [mode] if isinstance(mode, str) else frame.f_code.co_consts
    return any(isinstance(each, str) and _WRITES.fullmatch(each) is not None for each in given)
