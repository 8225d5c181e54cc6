"""What a program does in handlers of `atexit` belongs to its run: they are called when its script has ended, as Python does."""

import atexit
import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from tightfit.capture.observe.attribution import is_user_file


class ExitHandlers:
    """The handlers of the user's own files, in the order of their registration. Those of libraries close what the trace drops, and are not called."""

    def __init__(self) -> None:
        self._handlers: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []

    @contextlib.contextmanager
    def collected(self) -> Iterator[None]:
        """While the program runs, its handlers are registered here."""
        register, unregister = atexit.register, atexit.unregister

        def registered(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Callable[..., Any]:
            if not is_user_file(_file_of(function)):
                return register(function, *args, **kwargs)
            self._handlers.append((function, args, kwargs))
            return function

        def unregistered(function: Callable[..., Any]) -> None:
            self._handlers[:] = [each for each in self._handlers if each[0] != function]
            unregister(function)

        atexit.register, atexit.unregister = registered, unregistered  # type: ignore[assignment]
        try:
            yield
        finally:
            atexit.register, atexit.unregister = register, unregister  # type: ignore[assignment]

    def run(self) -> None:
        """Calls them, the last one first. An error of one is raised when all have been called."""
        while self._handlers:
            with contextlib.ExitStack() as handlers:
                for function, args, kwargs in self._handlers:
                    handlers.callback(function, *args, **kwargs)
                # They may register others.
                self._handlers.clear()


def _file_of(function: Callable[..., Any]) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    if not hasattr(function, "__code__") and not hasattr(function, "__func__"):
        # An object with a `__call__` of its own.
        function = type(function).__call__
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return "<builtin>" if code is None else code.co_filename
