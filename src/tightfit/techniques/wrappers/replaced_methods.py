"""A method of one object of the user's, replaced on the object itself for the time of a session.

What somebody else has put around it, or in its place, stays when the session is undone; inside of that it then does what was there before.
A copy of the object, and one that is read from a file, have their own method.
"""

import copy
import inspect
import weakref
from collections.abc import Callable
from typing import Any


class Layer:
    """`value` in the place of `holder.name`, which was `previous` before: None for the method of the holder's class."""

    def __init__(self, holder: Any, name: str, value: Callable[..., Any], previous: Any) -> None:
        self._holder = weakref.ref(holder)
        self._name = name
        self._value: Callable[..., Any] | None = value
        self._previous = previous

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._current()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._current(), name)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._current())

    def take_off(self) -> None:
        """Puts back what was there, if this is still there, and does no more than that wherever it is called from now on."""
        self._value = None
        holder = self._holder()
        if holder is None or vars(holder).get(self._name) is not self:
            return
        if self._previous is None:
            delattr(holder, self._name)
        else:
            setattr(holder, self._name, self._previous)

    def _current(self) -> Callable[..., Any]:
        if self._value is not None:
            return self._value
        return _method(self._holder(), self._name) if self._previous is None else self._previous

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        if hasattr(type(self._value), "__deepcopy__"):
            return copy.deepcopy(self._value, memo)  # type: ignore[return-value]
        if self._previous is not None:
            return copy.deepcopy(self._previous, memo)
        return _method(copy.deepcopy(self._holder(), memo), self._name)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._holder(), self._name)


def _method(holder: Any, name: str) -> Callable[..., Any]:
    return getattr(type(holder), name).__get__(holder)
