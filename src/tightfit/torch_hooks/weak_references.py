"""Weak references whose callbacks run no Python code: C functions log which objects were collected, and the log is worked off later.

Python drops an exception that is raised in the callback of a weak reference, and it runs signal handlers between the instructions of any Python
code: an interrupt that arrives inside of a callback written in Python is lost. `weakref.WeakKeyDictionary` and `WeakSet` have such callbacks too.
"""

import collections
import copy
import functools
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar, cast

Key = TypeVar("Key")
Value = TypeVar("Value")
_Note = Callable[[weakref.ref[Any]], object]


class Deaths:
    """Logs collected objects, with the time of each, until the log is read. `note` and `note_time` are callbacks of weak references."""

    def __init__(self) -> None:
        # `deque.append` is atomic and written in C: a callback may arrive between any two instructions of any
        # thread.
        self._log: collections.deque[weakref.ref[Any] | int] = collections.deque()
        self.note: _Note = self._log.append
        # Each `next` of this reads the clock and logs the time; `next(times, reference)` is how a callback
        # calls it.
        times = map(self._log.append, iter(time.time_ns, None))
        self.note_time: _Note = functools.partial(cast(Callable[..., object], next), times)

    def __iter__(self) -> Iterator[tuple[weakref.ref[Any], int]]:
        """The logged references, in order, with the Unix time in nanoseconds, or 0 where it was not logged.

        Each is removed when the next one is asked for, so that an interrupted reader gets it again: a reference may come twice.
        """
        time_ns = 0
        while self._log:
            entry = self._log[0]
            if isinstance(entry, int):
                time_ns = entry
            else:
                yield entry, time_ns
            # The consumer may have read the log itself in between.
            if self._log and self._log[0] is entry:
                self._log.popleft()


class _KeyReference(weakref.ref[Key]):
    """A weak reference that knows the key of its object in a table."""

    __slots__ = ("place",)

    place: int


class WeakTable(Generic[Key, Value]):
    """Values by weakly held objects, compared by identity. The value of a collected object is dropped when the table is next used."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[_KeyReference[Key], Value]] = {}
        self._deaths = Deaths()

    def __setitem__(self, key: Key, value: Value) -> None:
        self._work_off()
        reference = _KeyReference(key, self._deaths.note)
        reference.place = id(key)
        self._entries[reference.place] = reference, value

    def __contains__(self, key: object) -> bool:
        self._work_off()
        return id(key) in self._entries

    def __getitem__(self, key: Key) -> Value:
        self._work_off()
        if id(key) not in self._entries:
            raise KeyError(key)
        return self._entries[id(key)][1]

    def __delitem__(self, key: Key) -> None:
        self._work_off()
        del self._entries[id(key)]

    def __len__(self) -> int:
        self._work_off()
        return len(self._entries)

    def __iter__(self) -> Iterator[Key]:
        return (key for key, _ in self.items())

    def __deepcopy__(self, memo: dict[int, Any]) -> "WeakTable[Key, Value]":

        new: WeakTable[Key, Value] = WeakTable()
        for key, value in self.items():
            new[key] = copy.deepcopy(value, memo)
        return new

    def __reduce__(self) -> tuple[Any, ...]:
        # Where it is read again, its objects are others.
        return WeakTable, ()

    def get(self, key: Key) -> Value | None:
        """The value of `key`; None if it has none."""
        self._work_off()
        entry = self._entries.get(id(key))
        return None if entry is None else entry[1]

    def setdefault(self, key: Key, value: Value) -> Value:
        """The value of `key`, which is `value` from now on if it had none."""
        if key not in self:
            self[key] = value
        return self[key]

    def items(self) -> list[tuple[Key, Value]]:
        """The live objects, with their values."""
        self._work_off()
        living = [(reference(), value) for reference, value in self._entries.values()]
        return [(key, value) for key, value in living if key is not None]

    def values(self) -> list[Value]:
        """The values of the live objects."""
        return [value for _, value in self.items()]

    def _work_off(self) -> None:
        for reference, _ in self._deaths:
            entry = self._entries.get(cast(_KeyReference[Key], reference).place)
            # Another object may stand there by now.
            if entry is not None and entry[0] is reference:
                self._entries.pop(cast(_KeyReference[Key], reference).place, None)
