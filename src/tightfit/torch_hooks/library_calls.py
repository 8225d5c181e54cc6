"""Notifies owners of what a program does through Python's own library that reaches other threads, other processes or files.

Audit events (`audit_events`) come before files and databases are open, and none tells of an item put into a queue or taken from one, of bytes sent, or
of what is written to a descriptor. The functions and methods for those are replaced like names of torch are (`replaced`), so that owners may come and go
in any order.
"""

import functools
import importlib.util
import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol

from tightfit.errors.private_names import Name, known
from tightfit.torch_hooks.replaced import Leave, Replaced

GAVE_TO_THREAD, TOOK_FROM_THREAD = "gave something to another thread", "took something from another thread"
GAVE_TO_PROCESS, TOOK_FROM_PROCESS = "gave something to another process", "took something from another process"
STARTED_THREAD = "started a thread"
_AT_THE_END = "changed what is called at the end of the program"
_STANDARD = (0, 1, 2)
_PURPOSE = "to know which steps of training reach outside of the process"


class LibraryCallOwner(Protocol):
    """Is notified of calls. It is held weakly."""

    def gives(self, what: str) -> None:
        """Called before something is given to another thread, process or file, or taken from one; `what` says it, with "it" in mind ("gave work to another thread")."""
        ...

    def opened(self, file: Any, opened: Any) -> None:
        """Called when `file`, a path or a descriptor, was opened as `opened`."""
        ...

    def connected(self, connection: Any) -> None:
        """Called when a connection to a database of SQLite was made."""
        ...


def on_library_calls(owner: LibraryCallOwner) -> Leave:
    """Notifies `owner` until the returned function is called, or `owner` is collected."""
    with ExitStack() as left:
        for replaced in _REPLACED:
            left.callback(replaced.enter(owner))
        return left.pop_all().close


def _put_giving(
    what: str, inner: Callable[..., Any], owners: Callable[[], list[LibraryCallOwner]]
) -> Callable[..., Any]:
    @functools.wraps(inner)
    def giving(*args: Any, **kwargs: Any) -> Any:
        for owner in owners():
            owner.gives(what)
        return inner(*args, **kwargs)

    return giving


def _put_moving(
    path: str, what: str, inner: Callable[..., Any], owners: Callable[[], list[LibraryCallOwner]]
) -> Callable[..., Any]:
    @functools.wraps(inner)
    def moving(descriptor: int, *args: Any, **kwargs: Any) -> Any:
        # The standard streams are not looked at here: what is printed there may be printed again.
        if descriptor not in _STANDARD:
            for owner in owners():
                owner.gives(what)
        return inner(descriptor, *args, **kwargs)

    return _named(path, moving)


def _put_opening(
    path: str, inner: Callable[..., Any], owners: Callable[[], list[LibraryCallOwner]]
) -> Callable[..., Any]:
    @functools.wraps(inner)
    def opening(file: Any, *args: Any, **kwargs: Any) -> Any:
        opened = inner(file, *args, **kwargs)
        for owner in owners():
            owner.opened(file, opened)
        return opened

    return _named(path, opening)


def _named(path: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function under the name by which it is found: what pickles it looks it up there, and what it stands for calls itself after a module in C."""
    function.__module__, _, function.__qualname__ = path.partition(":")
    return function


def _put_connecting(inner: Callable[..., Any], owners: Callable[[], list[LibraryCallOwner]]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def connecting(*args: Any, **kwargs: Any) -> Any:
        connection = inner(*args, **kwargs)
        for owner in owners():
            owner.connected(connection)
        return connection

    return connecting


def _of_python(path: str) -> Name:
    return known(path, _PURPOSE, "guarding", first="3.11", last="3.14", is_checked=False)


_GIVING = {
    "queue:Queue.put": GAVE_TO_THREAD,
    "queue:Queue.get": TOOK_FROM_THREAD,
    "multiprocessing.queues:Queue.put": GAVE_TO_PROCESS,
    "multiprocessing.queues:Queue.get": TOOK_FROM_PROCESS,
    **{f"multiprocessing.connection:_ConnectionBase.{name}": GAVE_TO_PROCESS for name in ("send", "send_bytes")},
    **{
        f"multiprocessing.connection:_ConnectionBase.{name}": TOOK_FROM_PROCESS
        for name in ("recv", "recv_bytes", "recv_bytes_into")
    },
    **{
        f"multiprocessing.pool:Pool.{name}": "gave work to a pool"
        for name in ("apply_async", "_map_async", "imap", "imap_unordered")
    },
    # How processes are started otherwise than by a fork.
    "multiprocessing.util:spawnv_passfds": "started a program",
    "concurrent.futures.thread:ThreadPoolExecutor.submit": "gave work to another thread",
    "concurrent.futures.process:ProcessPoolExecutor.submit": "gave work to another process",
    "threading:Thread.start": STARTED_THREAD,
    "socket:socket.send": "sent a message",
    "socket:socket.sendall": "sent a message",
    **{
        f"socket:socket.{name}": "received a message"
        for name in ("recv", "recv_into", "recvfrom", "recvfrom_into", "recvmsg", "recvmsg_into")
    },
    "os:umask": "changed the mask of new files",
    "signal:raise_signal": "sent a signal",
    "atexit:register": _AT_THE_END,
    "atexit:unregister": _AT_THE_END,
}
_MOVING = {
    **dict.fromkeys(
        ("os:write", "os:writev", "os:pwrite", "os:pwritev", "os:sendfile"), "wrote to a file that is open"
    ),
    **dict.fromkeys(("os:read", "os:readv", "os:lseek"), "moved on in a file that is open"),
    "os:copy_file_range": "copied to a file that is open",
}
# `pathlib` has the second of each pair.
# Those of compressed files have text in a buffer of their own before they write to the file that they open.
# Python may be without those; `zlib` it has.
_COMPRESSED = ("gzip", *(name for name in ("bz2", "lzma") if importlib.util.find_spec(f"_{name}")))
_OPENING = ("builtins:open", "io:open", *(f"{name}:open" for name in _COMPRESSED))
_CONNECTING = ("sqlite3:connect", "sqlite3.dbapi2:connect") if importlib.util.find_spec("sqlite3") else ()
_REPLACED: tuple[Replaced[LibraryCallOwner], ...] = (
    *(Replaced(_of_python(path), functools.partial(_put_giving, what)) for path, what in _GIVING.items()),
    *(
        Replaced(_of_python(path), functools.partial(_put_moving, path, what))
        for path, what in _MOVING.items()
        if hasattr(os, path.partition(":")[2])
    ),
    *(Replaced(_of_python(path), functools.partial(_put_opening, path)) for path in _OPENING),
    *(Replaced(_of_python(path), _put_connecting) for path in _CONNECTING),
)
