"""Finds the line of the user's code that writes an attribute or draws from a random generator, by reading bytecode.

Code is read, not run. Of several lines that name it, one that stores it comes first, then one that calls a mutating method, then any other.
"""

import functools
import random
import re
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from tightfit.capture.observe.attribution import short
from tightfit.effects.bytecode.instructions import instructions_of
from tightfit.effects.users_code import is_users_file

# A bound for programs that name whole libraries of their own; what is sought is close to the forward.
_MAX_FUNCTIONS = 256
_CHANGES = frozenset(
    {"append", "appendleft", "extend", "insert", "pop", "popleft", "popitem", "remove", "clear", "update", "setdefault"}
    | {"add", "discard", "write", "__setitem__"}
)
_STORES = ("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF", "DELETE_ATTR", "DELETE_GLOBAL")
_LOADS = ("LOAD_ATTR", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_NAME")


def line_of(module: torch.nn.Module, path: str) -> str:
    """The line in the code of `module` or its submodules that changes `path`; empty where none is found."""
    names = [name for name in re.split(r"[^A-Za-z_0-9]+", path) if name and not name.isdigit()]
    functions = list(_functions(module))
    if path.startswith(("Python's", "numpy.")):
        return _first(_draws(function, "numpy" if path.startswith("numpy.") else "random") for function in functions)
    # The last part of a path (`encoder.cache.keys`) says most about what is written.
    for name in reversed(names):
        found = sorted(place for function in functions for place in _places(function.__code__, name))
        if found:
            return found[0][1]
    return ""


def line_of_function(function: Any) -> str:
    """The first line of a function or a method; empty if it is not the user's."""
    while not isinstance(function, types.FunctionType):
        inner = getattr(function, "__func__", None) or getattr(function, "func", None)
        if inner is None:
            inner = vars(type(function)).get("__call__")
        if inner is None or inner is function:
            return ""
        function = inner
    code = function.__code__
    return f"{short(code.co_filename)}:{code.co_firstlineno}" if is_users_file(code.co_filename) else ""


def _functions(module: torch.nn.Module) -> Iterator[types.FunctionType]:
    """The user's functions that the forward of `module` may run: methods, hooks, and the functions that these name."""
    waiting: list[Any] = []
    for part in module.modules():
        for kind in type(part).__mro__:
            waiting += vars(kind).values()
        for hooks in (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks):
            waiting += hooks.values()
        waiting.append(vars(part).get("forward"))
    seen: set[int] = set()
    while waiting and len(seen) < _MAX_FUNCTIONS:
        value = waiting.pop(0)
        if isinstance(value, staticmethod | classmethod | types.MethodType):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget
        elif isinstance(value, functools.partial):
            value = value.func
        if (
            not isinstance(value, types.FunctionType)
            or id(value) in seen
            or not is_users_file(value.__code__.co_filename)
        ):
            continue
        seen.add(id(value))
        yield value
        for code in _codes(value.__code__):
            waiting += [value.__globals__[name] for name in code.co_names if name in value.__globals__]
        waiting += [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _places(code: types.CodeType, name: str) -> Iterator[tuple[tuple[int, int], str]]:
    """Each place where `name` is stored or loaded, ranked by how likely it is to change it."""
    for inner in _codes(code):
        instructions = list(instructions_of(inner))
        for number, instruction in enumerate(instructions):
            if instruction.argval != name or instruction.opname not in (*_STORES, *_LOADS):
                continue
            following = [i for i in instructions[number + 1 : number + 4] if i.opname in _LOADS or "STORE" in i.opname]
            method = str(following[0].argval) if following else ""
            # A trailing underscore is torch's convention for in-place methods.
            changes = method in _CHANGES or (method.endswith("_") and not method.endswith("__"))
            # The constructor stores every attribute once; the line that is sought is the one that stores it
            # again.
            is_setup = inner.co_name == "__init__"
            rank = 0 if instruction.opname in _STORES else 1 if changes else 2
            yield (rank + 10 * is_setup, instruction.line), f"{short(inner.co_filename)}:{instruction.line}"


def _draws(function: types.FunctionType, package: str) -> str:
    """The first line that names Python's `random` or numpy, or a function of the generator in it."""
    for code in _codes(function.__code__):
        for instruction in instructions_of(code):
            if instruction.opname not in ("LOAD_GLOBAL", "LOAD_NAME"):
                continue
            value = function.__globals__.get(instruction.argval)
            if isinstance(value, types.ModuleType):
                is_meant = value.__name__.partition(".")[0] == package
            else:
                generator = getattr(value, "__self__", None)
                # `from random import shuffle` binds a method of the module's hidden generator.
                is_meant = package == "random" and generator is random._inst  # type: ignore[attr-defined]
            if is_meant:
                return f"{short(code.co_filename)}:{instruction.line}"
    return ""


def _first(found: Iterable[str]) -> str:
    return next((each for each in found if each), "")
