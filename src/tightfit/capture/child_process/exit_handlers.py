"""What a program does at its end belongs to its run: handlers of `atexit`, finalizers, `__del__` and `sys.excepthook` are called when its script has ended, as Python does."""

import atexit
import contextlib
import functools
import gc
import inspect
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import thread as pools
from typing import Any

from tightfit.capture.observe.attribution import is_user_file

SECONDS_FOR_THREADS = 5.0


def wait_for_threads(is_of_the_program: Callable[[threading.Thread], bool]) -> bool:
    """Waits for the program's threads, and the tasks of its pools, as Python does at the end of a script; False where some go on for too long."""
    for tasks in list(pools._threads_queues.values()):  # type: ignore[attr-defined]
        # Its worker ends, with those beside it, when what comes before is done and the pool is told so.
        pools._shutdown = True  # type: ignore[attr-defined]
        tasks.put(None)
    own = [one for one in threading.enumerate() if not one.daemon and one is not threading.current_thread()]
    own = [one for one in own if is_of_the_program(one)]
    end = time.monotonic() + SECONDS_FOR_THREADS
    for thread in own:
        thread.join(max(0.0, end - time.monotonic()))
    return not any(thread.is_alive() for thread in own)


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
        _call_finalizers()
        _delete()

    def run_after(self, error: BaseException) -> None:
        """The same after an error of the program's, which its own `sys.excepthook` is told first. What is raised here is not what ended the program."""
        with contextlib.suppress(Exception, SystemExit):
            if not isinstance(error, SystemExit) and is_user_file(_file_of(sys.excepthook)):
                sys.excepthook(type(error), error, error.__traceback__)
        with contextlib.suppress(Exception, SystemExit):
            self.run()


def _call_finalizers() -> None:
    """Calls finalizers of `weakref.finalize` that are the program's own, the last one first, as Python does at its end."""
    registry: dict[Any, Any] = weakref.finalize._registry  # type: ignore[attr-defined]
    own = [(one, info) for one, info in registry.items() if info.atexit and is_user_file(_file_of(info.func))]
    for finalizer, _ in sorted(own, key=lambda each: -each[1].index):
        finalizer()


def _delete() -> None:
    """Calls `__del__` of the program's own classes for the objects that are left. Python lets go of one after the other; here all the others are still there."""
    # Those of torch's tensors and modules are of no such class: most programs have none, and their objects are not looked at.
    found = [one for one in gc.get_objects() if _has_own_end(type(one))]
    for one in found:
        # Python prints such an error, and goes on.
        with contextlib.suppress(Exception):
            type(one).__del__(one)


@functools.cache
def _has_own_end(kind: type) -> bool:
    end = getattr(kind, "__del__", None)
    code = getattr(end, "__code__", None)
    return code is not None and is_user_file(code.co_filename)


def _file_of(function: Callable[..., Any]) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    if not hasattr(function, "__code__") and not hasattr(function, "__func__"):
        # An object with a `__call__` of its own.
        function = type(function).__call__
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return "<builtin>" if code is None else code.co_filename
