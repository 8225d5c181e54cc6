"""Replaces a method on one of the user's objects until the session is undone.

Wrappers and replacements by other code stay when the session is undone; inside of these our method then behaves like the original.
A copy of the object, or one that is unpickled, has its own method.
"""

import copy
import inspect
import weakref
from collections.abc import Callable
from typing import Any

from tightfit.techniques.wrappers.forwards import its_first


class MethodReplacement:
    """Replaces `holder.name` by `value`; `previous` is the former entry of the object's `__dict__`, None for the method of its class."""

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
        """Restores the former method, if this one is still in place; wherever else it is called from then on, it calls the former one."""
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
        if self._previous is not None:
            return its_first, ((self._previous,), 0)
        return getattr, (self._holder(), self._name)


def _method(holder: Any, name: str) -> Callable[..., Any]:
    return getattr(type(holder), name).__get__(holder)
