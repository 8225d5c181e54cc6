"""Objects of Python's own that hold something and show it neither as attributes nor as items: bytes, C values, logs in memory, iterators."""

import array
import ctypes
import io
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

State = tuple[Callable[[], Any], Callable[[Any], None] | None]

_OF_C = (ctypes._SimpleCData, ctypes.Structure, ctypes.Union, ctypes.Array)  # type: ignore[attr-defined]
_BUILT_IN = ("builtins", "itertools")


def state_of(value: Any) -> State | None:
    """How to read what `value` holds now, comparably, and how to put it back (None where it only goes forward); None for all other objects."""
    # The system's source of chance has no state that could be read.
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return value.getstate, value.setstate
    if isinstance(value, Iterator) and type(value).__module__ in _BUILT_IN:
        return lambda: _position(value), None
    return _state_of_memory(value)


def _state_of_memory(value: Any) -> State | None:
    if isinstance(value, bytearray):
        return lambda: bytes(value), lambda content: value.__setitem__(slice(None), content)
    if isinstance(value, array.array):
        return value.tobytes, lambda content: value.__setitem__(slice(None), array.array(value.typecode, content))
    if isinstance(value, _OF_C):
        return lambda: bytes(value), lambda content: _put_in_c(value, content)
    if isinstance(value, io.StringIO | io.BytesIO):
        return lambda: None if value.closed else value.__getstate__(), _put_in_log(value)
    return None


def _put_in_c(value: Any, content: bytes) -> None:
    ctypes.memmove(ctypes.addressof(value), content, len(content))


def _put_in_log(value: io.StringIO | io.BytesIO) -> Callable[[Any], None]:
    def put(content: Any) -> None:
        if content is not None:
            value.__setstate__(content)  # pyrefly: ignore[missing-attribute]

    return put


def _position(iterator: Any) -> Any:
    """What tells two positions of an iterator apart; a new object, which is like no other, where it does not say."""
    try:
        with warnings.catch_warnings():
            # Copies of iterators are to go from Python 3.14 on.
            warnings.simplefilter("ignore", DeprecationWarning)
            reduced = iterator.__reduce__()
    except TypeError:
        return object()
    return type(iterator).__name__, _parts(reduced[1:])


def _parts(parts: Any) -> Any:
    return tuple(
        _parts(part)
        if isinstance(part, tuple)
        else part
        if isinstance(part, bool | int | None)
        else _position(part)
        if isinstance(part, Iterator) and type(part).__module__ in _BUILT_IN
        else id(part)
        for part in parts
    )
