"""Where a search for the holder of an object begins: local variables of running and suspended functions, context variables and globals of modules."""

import contextvars
import gc
import inspect
import os
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

from tightfit.capture.observe.attribution import is_user_file, short
from tightfit.runtime.recorded import is_own_frame

Named = tuple[str, str, Any]
"""The name as a path begins with it, what it is the name of, and the object."""

_SUSPENDED = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)
# Before 3.13 a frame's `f_locals` is a dict that the frame keeps, and with it every local, until it is asked again (PEP 667).
_NO_MODULE = "<none>"
_KEEPS_LOCALS = sys.version_info < (3, 13)


class NamedRoots:
    """Gives the roots, those of the user's own code first. `forget` is to be called at the end: it drops what the frames have kept for it."""

    def __init__(self) -> None:
        self._copies: list[dict[str, Any]] = []

    def of_users_code(self) -> Iterator[Named]:
        """Of the user's functions and modules."""
        frames = list(_frames())
        for frame in frames:
            if is_users_or_test(frame.f_code.co_filename):
                yield from self._of_frame(frame)
        for variable, value in contextvars.copy_context().items():
            yield variable.name, "value of a context variable", value
        for name, module in list(sys.modules.items()):
            file = _file_of(module)
            if file != _NO_MODULE and (name == "__main__" or is_users_or_test(file)):
                yield from _of_module(name, module)

    def of_libraries(self) -> Iterator[Named]:
        """Of all other functions and modules, but our own."""
        for frame in list(_frames()):
            file = frame.f_code.co_filename
            if not is_users_or_test(file) and not is_own_frame(file):
                yield from self._of_frame(frame)
        for name, module in list(sys.modules.items()):
            file = _file_of(module)
            if file != _NO_MODULE and not is_users_or_test(file) and not name.startswith("tightfit"):
                yield from _of_module(name, module)

    def forget(self) -> None:
        """Drops the references that were made on the way."""
        for copied in self._copies:
            copied.clear()
        self._copies.clear()

    def _of_frame(self, frame: types.FrameType) -> Iterator[Named]:
        code = frame.f_code
        # The locals of a module are its globals, and those of a class its attributes.
        if not code.co_flags & inspect.CO_OPTIMIZED:
            return
        values = frame.f_locals
        if _KEEPS_LOCALS:
            self._copies.append(values)
        root = f"local variable of {code.co_qualname}() at {short(code.co_filename)}:{frame.f_lineno}"
        for name, value in list(values.items()):
            # Loop variables of comprehensions and the like have names that no program writes.
            if not name.startswith("."):
                yield f"{code.co_name}.{name}", root, value


def _file_of(module: object) -> str:
    """The file of a module, empty where it has none; without asking the module, which may import something then."""
    if not issubclass(type(module), types.ModuleType):
        return _NO_MODULE
    return str(vars(module).get("__file__") or "")


def is_users_or_test(filename: str) -> bool:
    """Whether a file is the user's own."""
    return bool(filename) and not is_own_frame(filename) and is_user_file(filename)


def _frames() -> Iterator[types.FrameType]:
    """The frames of all threads, the current one's first, and those of suspended generators and coroutines."""
    current = sys._current_frames()
    own = threading.get_ident()
    for thread in sorted(current, key=lambda known: known != own):
        frame: types.FrameType | None = current[thread]
        while frame is not None:
            yield frame
            frame = frame.f_back
    for found in gc.get_objects():
        if type(found) in _SUSPENDED:
            suspended = _suspended_frame(found)
            if suspended is not None:
                yield suspended


def _suspended_frame(found: Any) -> types.FrameType | None:
    if isinstance(found, types.GeneratorType):
        return None if found.gi_running else found.gi_frame
    if isinstance(found, types.CoroutineType):
        return None if found.cr_running else found.cr_frame
    return None if found.ag_running else found.ag_frame


def _of_module(name: str, module: types.ModuleType) -> Iterator[Named]:
    shown = os.path.splitext(os.path.basename(_file_of(module) or name))[0] if name == "__main__" else name
    for attribute, value in list(vars(module).items()):
        if not attribute.startswith("__"):
            yield f"{shown.rpartition('.')[2]}.{attribute}", f"global of module {name}", value
