"""Built-in objects with state that is neither attributes nor items: bytearrays, C values, in-memory files, iterators."""

import array
import ctypes
import hashlib
import io
import mmap
import pickle
import queue
import random
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tightfit.effects.reachable.classes_of_libraries import UNCHANGING
from tightfit.effects.reachable.scopes import slots_of
from tightfit.effects.users_code import module_of

State = tuple[Callable[[], Any], Callable[[Any], None] | None]

_OF_C = (ctypes._SimpleCData, ctypes.Structure, ctypes.Union, ctypes.Array)  # type: ignore[attr-defined]
_PLACE_BYTES = 8
_BUILT_IN = ("builtins", "itertools")
# The place of one in its text cannot be read.
_SCANNER = type(re.compile("").scanner(""))  # type: ignore[attr-defined]
_HASHES: tuple[Any, ...] = tuple({type(hashlib.new(name)) for name in hashlib.algorithms_guaranteed})


def state_of(value: Any) -> State | None:
    """A function that reads the state of `value` as a comparable object, and one that restores it (None for iterators); None for other objects."""
    # The system's source of chance has no state that could be read.
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return value.getstate, value.setstate
    if isinstance(value, Iterator) and module_of(type(value)) in _BUILT_IN:
        return lambda: position(value), None
    if isinstance(value, _SCANNER):
        return object, None
    return _state_in_array(value) or _state_of_view(value) or _state_of_memory(value) or _state_of_processes(value)


def _state_in_array(value: Any) -> State | None:
    if isinstance(value, np.flatiter):
        return lambda: value.index, None
    if isinstance(value, np.nditer):
        return lambda: value.finished or value.iterindex, None
    if isinstance(value, np.ndenumerate):
        # Its one attribute is the iterator over the array.
        return lambda: vars(value)["iter"].index, None
    if isinstance(value, np.random.SeedSequence):
        return lambda: value.n_children_spawned, None
    return None


def _state_of_view(value: Any) -> State | None:
    if isinstance(value, memoryview):
        return value.tobytes, None if value.readonly else lambda content: _put_in_view(value, content)
    if isinstance(value, mmap.mmap):
        # Others may have it mapped: it is looked at, and never put back.
        return lambda: None if value.closed else (value.tell(), hash(value[:])), None
    return None


def _state_of_memory(value: Any) -> State | None:
    if isinstance(value, bytearray):
        return lambda: bytes(value), lambda content: value.__setitem__(slice(None), content)
    if isinstance(value, array.array):
        return value.tobytes, lambda content: value.__setitem__(slice(None), array.array(value.typecode, content))
    if isinstance(value, _OF_C):
        return lambda: bytes(value), lambda content: _put_in_c(value, content)
    if isinstance(value, io.StringIO | io.BytesIO):
        return lambda: None if value.closed else value.__getstate__(), _put_in_log(value)
    return _state_of_stream(value)


def _state_of_stream(value: Any) -> State | None:
    # Other threads use them too: they are looked at, and never put back.
    if isinstance(value, threading.Semaphore):
        # Its number is shown, and has no public name.
        return value.__repr__, None
    if isinstance(value, threading.Event):
        return value.is_set, None
    if isinstance(value, queue.SimpleQueue):
        # What it holds cannot be looked at; how much it holds can.
        return value.qsize, None
    if isinstance(value, _HASHES):
        # Those of variable length have no size of their own.
        return value.digest if value.digest_size else lambda: value.digest(32), None
    return (lambda: _place_in_file(value), None) if isinstance(value, io.IOBase) else None


def _state_of_processes(value: Any) -> State | None:
    # What several processes share is looked at, and never put back. Without these modules a program has none of it.
    if isinstance(value, _of_module("multiprocessing.sharedctypes", "SynchronizedBase")):
        return lambda: _digest(value.get_obj()), None
    if isinstance(value, _of_module("multiprocessing.synchronize", "Event")):
        return value.is_set, None
    if isinstance(value, _of_module("multiprocessing.synchronize", "Semaphore")):
        # Its number is shown, and has no public name.
        return value.__repr__, None
    if isinstance(value, _of_module("multiprocessing.shared_memory", "SharedMemory")):
        return lambda: _digest(value.buf), None
    return None


def _of_module(module: str, name: str) -> type | tuple[()]:
    return getattr(sys.modules.get(module), name, ())


def _digest(memory: Any) -> Any:
    """What is compared of memory; None once it is closed."""
    return None if memory is None else hash(bytes(memory))


def _place_in_file(file: Any) -> Any:
    """Where a file is read; what is written to one, or read from a terminal or a pipe, is not the program's state."""
    if file.closed or not file.readable() or not file.seekable():
        return None
    try:
        return file.tell()
    except OSError:
        # In the middle of a loop over its lines, a text file cannot tell.
        return object()


def _put_in_view(view: memoryview, content: bytes) -> None:
    view.cast("B")[:] = content


def _put_in_c(value: Any, content: bytes) -> None:
    ctypes.memmove(ctypes.addressof(value), content, len(content))


def _put_in_log(value: io.StringIO | io.BytesIO) -> Callable[[Any], None]:
    def put(content: Any) -> None:
        if content is not None:
            value.__setstate__(content)  # pyrefly: ignore[missing-attribute]

    return put


def position(iterator: Any) -> Any:
    """A comparable position of an iterator, or state of another object in C; a new object, equal to no other, if it cannot tell."""
    parts = written_down(iterator)
    return object() if parts is None else (type(iterator).__name__, _parts(parts))


def written_down(value: Any) -> tuple[Any, ...] | None:
    """What an object is made again with; None where it cannot tell."""
    try:
        with warnings.catch_warnings():
            # Copies of iterators are to go from Python 3.14 on.
            warnings.simplefilter("ignore", DeprecationWarning)
            # Of protocol 2, which says no where an object of C has more than its attributes.
            reduced = value.__reduce_ex__(2)
    except (TypeError, ValueError, RuntimeError, AttributeError, pickle.PicklingError):
        return None
    return reduced[1:] if isinstance(reduced, tuple) else None


def is_of_c(value: Any) -> bool:
    """Whether an object of a library has a state in C, which no attributes show, and that may change: an emulator, a reader of video.

    Its class has more bytes than a dict, weak references, slots and what is known of Python's own classes take.
    """
    kind = type(value)
    if _origin(kind) in UNCHANGING:
        return False
    known = max(base.__basicsize__ for base in kind.__mro__ if _is_known(base))
    return kind.__basicsize__ > known + _PLACE_BYTES * (len(slots_of(kind)) + 2)


def _is_known(kind: type) -> bool:
    return _origin(kind) in UNCHANGING or _origin(kind) in sys.stdlib_module_names


def _origin(kind: type) -> str:
    return module_of(kind).partition(".")[0]


def _parts(parts: Any) -> Any:
    return tuple(
        _parts(part)
        if isinstance(part, tuple)
        else part
        if isinstance(part, bool | int | float | str | bytes | slice | None)
        else position(part)
        if isinstance(part, Iterator) and module_of(type(part)) in _BUILT_IN
        else id(part)
        for part in parts
    )


def functions_of(iterator: Any) -> Iterator[Any]:
    """What an iterator of Python's own calls for its items, and what those that it draws from call (`map`, `filter`, `iter` with two arguments)."""
    if not (isinstance(iterator, Iterator) and module_of(type(iterator)) in _BUILT_IN):
        return
    waiting = list(written_down(iterator) or ())
    while waiting:
        part = waiting.pop()
        if isinstance(part, tuple):
            waiting += part
        elif isinstance(part, Iterator):
            yield from functions_of(part)
        elif callable(part) and not isinstance(part, type):
            yield part
