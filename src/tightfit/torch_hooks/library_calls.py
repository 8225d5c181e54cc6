"""Notifies owners of what a program does through Python's own library that reaches other threads, other processes or files.

Audit events (`audit_events`) come before files and databases are open, and none tells of an item put into a queue or of bytes sent. The functions
and methods for those are replaced like names of torch are (`replaced`), so that owners may come and go in any order.
"""

import functools
import importlib.util
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol

from tightfit.errors.private_names import Name, known
from tightfit.torch_hooks.replaced import Leave, Replaced

_PURPOSE = "to know which steps of training reach outside of the process"


class LibraryCallOwner(Protocol):
    """Is notified of calls. It is held weakly."""

    def gives(self, what: str) -> None:
        """Called before something is given to another thread or process; `what` says it, with "it" in mind ("gave work to another thread")."""
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


def _put_opening(inner: Callable[..., Any], owners: Callable[[], list[LibraryCallOwner]]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def opening(file: Any, *args: Any, **kwargs: Any) -> Any:
        opened = inner(file, *args, **kwargs)
        for owner in owners():
            owner.opened(file, opened)
        return opened

    return opening


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
    "queue:Queue.put": "gave something to another thread",
    "concurrent.futures.thread:ThreadPoolExecutor.submit": "gave work to another thread",
    "concurrent.futures.process:ProcessPoolExecutor.submit": "gave work to another process",
    "threading:Thread.start": "started a thread",
    "socket:socket.send": "sent a message",
    "socket:socket.sendall": "sent a message",
}
# `pathlib` has the second of each pair.
_OPENING = ("builtins:open", "io:open")
_CONNECTING = ("sqlite3:connect", "sqlite3.dbapi2:connect") if importlib.util.find_spec("sqlite3") else ()
_REPLACED: tuple[Replaced[LibraryCallOwner], ...] = (
    *(Replaced(_of_python(path), functools.partial(_put_giving, what)) for path, what in _GIVING.items()),
    *(Replaced(_of_python(path), _put_opening) for path in _OPENING),
    *(Replaced(_of_python(path), _put_connecting) for path in _CONNECTING),
)
