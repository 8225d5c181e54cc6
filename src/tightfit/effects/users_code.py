"""Which code is the user's own: functions, classes and modules that are not a library's, Python's or ours."""

import functools
import sys
import sysconfig
import types
from pathlib import Path
from typing import Any

import torch

FILES_OF_TORCH, FILES_OF_OURS = str(Path(torch.__file__).parent), str(Path(__file__).parents[1])
_LIBRARIES = tuple(
    {str(Path(sysconfig.get_paths()[name])) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    | {FILES_OF_TORCH, FILES_OF_OURS, "<frozen"}
)

_COMMON = frozenset(("torch", "tightfit", *sys.stdlib_module_names))


# An attribute of functions that this tool has put in the place of a library's: its own address, and what its owner had by that name, None where that was a
# base's. The address tells it from wrappers of others around it, to which `functools.wraps` copies what it finds.
STANDS_FOR = "tightfit_stands_for"


def mark_as_ours(wrapper: types.FunctionType, current: Any) -> None:
    """Marks a function of this tool that is put where `current` was."""
    vars(wrapper)[STANDS_FOR] = id(wrapper), current


def without_ours(value: Any) -> Any:
    """What stands in a place apart from what this tool has put there."""
    while isinstance(value, types.FunctionType):
        address, beneath = vars(value).get(STANDS_FOR, (None, None))
        if address != id(value):
            break
        value = beneath
    return value


def is_users_module(module: types.ModuleType) -> bool:
    """Whether a Python module is the user's own."""
    file = getattr(module, "__file__", None)
    # One that a program has made by itself has neither a file nor a loader.
    return is_users_file(file) if file else module.__spec__ is None and module.__loader__ is None


@functools.cache
def is_users_file(file: str) -> bool:
    """Whether code in `file` is the user's own, and not a library's, Python's or ours."""
    return not file.startswith(_LIBRARIES) and "site-packages" not in file and "dist-packages" not in file


def module_of(kind: type) -> str:
    """The name of a class's module; empty for a class in C that has none (the pointers of SWIG)."""
    name = getattr(kind, "__module__", "")
    return name if isinstance(name, str) else ""


def is_users_class(kind: type) -> bool:
    """Whether a class is the user's own."""
    file = getattr(sys.modules.get(module_of(kind)), "__file__", None)
    return module_of(kind) == "__main__" or (file is not None and is_users_file(file))


def is_of_library(kind: type) -> bool:
    """Whether a class is, or derives from, one of a library other than torch and Python's own."""
    # No cache: it would keep the class, and with it all that the program's module holds.
    found = (base for base in kind.__mro__ if module_of(base).partition(".")[0] not in _COMMON)
    return any(not is_users_class(base) for base in found)


def is_users_function(value: Any) -> bool:
    """Whether a value is a function that the user wrote, or an object of a class of theirs that is called like one."""
    if isinstance(value, types.FunctionType):
        return is_users_file(value.__code__.co_filename)
    return not isinstance(value, type | types.ModuleType) and callable(value) and is_users_class(type(value))
