"""Values that belong to a thread, a context or the process: context variables, thread-locals, slots and the environment, as holders.

The backward pass of a card runs in a thread of its own, where thread-locals and context variables are not those of the forward pass.
"""

import contextlib
import contextvars
import gc
import os
import queue
import threading
import types
import weakref
from collections import UserDict, UserList
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

from tightfit.effects.holders import Names
from tightfit.effects.users_code import module_of

# Containers of Python's library that are not dicts or lists, and keep one as an attribute. What only looks on at others (a weak set) loses its content by itself.
_INSIDE = (
    ((weakref.WeakKeyDictionary, UserDict, UserList), "data"),
    (queue.Queue, "queue"),
    ((contextlib.ExitStack, contextlib.AsyncExitStack), "_exit_callbacks"),
)
# Of dicts, which they have no name for.
_VIEWS = (types.MappingProxyType, type({}.keys()), type({}.values()), type({}.items()))
_QUEUES_OF_TASKS = "asyncio.queues"
# What reads the process's environment.
READS_ENVIRONMENT = frozenset({"environ", "getenv"})


class _Variable(MutableMapping[str, Any]):
    """A context variable as a dict of at most one entry. What was not set, and reads as its default, may become set to that."""

    def __init__(self, variable: contextvars.ContextVar[Any]) -> None:
        self._variable = variable

    def __getitem__(self, name: str) -> Any:
        try:
            return self._variable.get()
        except LookupError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        self._variable.set(value)

    def __delitem__(self, name: str) -> None:
        self._variable.set(_default(self._variable))

    def __iter__(self) -> Iterator[str]:
        return (name for name in ("value",) if name in self)

    def __len__(self) -> int:
        return len(list(iter(self)))


def _default(variable: contextvars.ContextVar[Any]) -> Any:
    """What a variable reads as where it is not set: it cannot be unset without the token of the call that set it."""
    try:
        return contextvars.Context().run(variable.get)
    except LookupError:
        return None


class _InContext(MutableMapping[Any, Any]):
    """The variables of a context that a program keeps and runs code in."""

    def __init__(self, context: contextvars.Context) -> None:
        self._context = context

    def __getitem__(self, variable: Any) -> Any:
        return self._context[variable]

    def __setitem__(self, variable: Any, value: Any) -> None:
        self._context.run(variable.set, value)

    def __delitem__(self, variable: Any) -> None:
        self._context.run(variable.set, _default(variable))

    def __iter__(self) -> Iterator[Any]:
        return iter(self._context)

    def __len__(self) -> int:
        return len(self._context)


class Slots(MutableMapping[str, Any]):
    """The attributes in slots of an object."""

    def __init__(self, owner: Any, names: Sequence[str]) -> None:
        self._owner = owner
        self._names = names

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self._owner, name)
        except AttributeError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        # Also where the class is frozen.
        object.__setattr__(self._owner, name, value)

    def __delitem__(self, name: str) -> None:
        object.__delattr__(self._owner, name)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names if name in self)

    def __len__(self) -> int:
        return len(list(iter(self)))


def slots_of(kind: type) -> tuple[str, ...]:
    """The names of a class's slots, as the attributes are called."""
    found = []
    for base in kind.__mro__:
        given = vars(base).get("__slots__", ())
        for name in (given,) if isinstance(given, str) else tuple(given):
            is_private = name.startswith("__") and not name.endswith("__")
            if name not in ("__dict__", "__weakref__"):
                # Python mangles private names in slots as in attributes.
                found.append(f"_{base.__name__.lstrip('_')}{name}" if is_private else name)
    return tuple(found)


def scope(path: str, value: Any) -> Names | None:
    """The holder of a context variable, of a context or of a thread-local object; None for other objects."""
    if isinstance(value, contextvars.Context):
        return Names(path, id(value), lambda: _InContext(value))
    if isinstance(value, contextvars.ContextVar):
        return Names(path, id(value), lambda: _Variable(value), only=("value",))
    if isinstance(value, threading.local):
        return Names(path, id(value), lambda: vars(value), is_attributes=True)
    return None


def environment() -> Names:
    """The process's environment."""
    return Names("os.environ", id(os.environ), lambda: os.environ)


def inner_container(value: Any) -> Any:
    """The container inside of a wrapper, the referent of a weak reference, or None."""
    for kinds, name in _INSIDE:
        if isinstance(value, kinds):
            return vars(value)[name]
    if module_of(type(value)) == _QUEUES_OF_TASKS:
        return vars(value).get("_queue")
    if isinstance(value, _VIEWS):
        (inner,) = gc.get_referents(value)
        # That of a class is written to through the class.
        return None if "__module__" in inner else inner
    if type(value) in weakref.ProxyTypes:
        try:
            # A proxy forwards attribute access to its object.
            return value.__init__.__self__
        except ReferenceError:
            return None
    return value() if isinstance(value, weakref.ref) else None
