"""Whether a function of the program's may write to something that stays, so that to call it twice is not to call it once.

Its code is read, and that of the program's functions that it names: attributes, globals and variables of outer functions that are set, and methods that change
what is not a variable of the function's own. It says yes rather too often: who asks goes without what it would have gained.
"""

import enum
import functools
import types
from collections.abc import Collection
from typing import Any

import torch

from tightfit.effects.bytecode.asked_of_saved import called, saved_names
from tightfit.effects.bytecode.instructions import instructions_of
from tightfit.effects.users_code import is_users_class, is_users_file, is_users_module

_WRITES = ("STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF", "DELETE_DEREF")
_FROM_OUTSIDE = ("LOAD_ATTR", "LOAD_DEREF", "LOAD_GLOBAL")
_CHANGING = frozenset(
    [
        *(
            "add",
            "append",
            "appendleft",
            "clear",
            "discard",
            "extend",
            "extendleft",
            "get",
            "get_nowait",
            "insert",
            "pop",
        ),
        *(
            "popitem",
            "popleft",
            "put",
            "put_nowait",
            "queue_callback",
            "remove",
            "reverse",
            "rotate",
            "send",
            "setdefault",
            "sort",
            "step",
        ),
        *("update", "write", "writelines"),
    ]
)
_FUNCTIONS = frozenset(["delattr", "exec", "next", "open", "setattr"])
# `torch.add` changes nothing.
_LIBRARIES = ("torch", "functional", "F", "np", "math")
# So far before a store into a container its name may be read.
_SPAN = 12


def may_write(function: Any) -> bool:
    """Whether a call of `function` may change something that a second call would find changed."""
    return _may_write(function, set())


def _may_write(function: Any, seen: set[Any]) -> bool:
    if isinstance(function, types.MethodType):
        function = function.__func__
    if not isinstance(function, types.FunctionType):
        return True
    seen.add(function)
    # What it names may be another function the next time.
    return any(_writes(one.__code__) or _names_code(one, seen) for one, _ in called(function))


def _names_code(function: types.FunctionType, seen: set[Any]) -> bool:
    """Whether it names something besides functions that may be called, and may write."""
    names = function.__code__.co_names
    space = function.__globals__
    named = [space[name] for name in names if name in space]
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            named += [] if variable == "__class__" else [cell.cell_contents]
        except ValueError:
            continue
    return any(_may_be_called(each, names, seen) for each in named)


def _may_be_called(value: Any, names: Collection[str], seen: set[Any]) -> bool:
    """Whether a value that code names, with the attributes `names`, runs code that may write when it is called, or when a method of it is."""
    if isinstance(value, types.FunctionType):
        # Those of the program's are read by themselves.
        return False
    if isinstance(value, types.BuiltinMethodType):
        # Such as the `append` of a list.
        return not isinstance(value.__self__, types.ModuleType | type(None))
    if isinstance(value, types.ModuleType):
        if not is_users_module(value) or value in seen:
            return False
        seen.add(value)
        held = [vars(value)[name] for name in names if name in vars(value)]
        return any(_may_write(each, seen) if _is_users(each) else _may_be_called(each, names, seen) for each in held)
    if isinstance(value, type):
        return _may_class_write(value, seen)
    return isinstance(value, torch.nn.Module | types.MethodType | functools.partial) or is_users_class(type(value))


def _may_class_write(kind: type, seen: set[Any]) -> bool:
    if kind in seen or not is_users_class(kind) or issubclass(kind, enum.Enum | BaseException):
        return False
    seen.add(kind)
    if issubclass(kind, torch.autograd.Function):
        return any(_may_write(function, seen) for function in (kind.forward, kind.backward) if _is_users(function))
    return True


def _is_users(value: Any) -> bool:
    return isinstance(value, types.FunctionType) and is_users_file(value.__code__.co_filename)


# By code, which does not keep what the program has in its globals.
@functools.lru_cache(maxsize=1024)
def _writes(code: types.CodeType) -> bool:
    saved, instructions = saved_names(code), list(instructions_of(code))
    for position, each in enumerate(instructions):
        before = instructions[position - 1] if position else None
        if each.opname in _WRITES or (each.opname == "LOAD_GLOBAL" and each.argval in _FUNCTIONS):
            return True
        span = instructions[max(0, position - _SPAN) : position]
        if each.opname in ("STORE_SUBSCR", "DELETE_SUBSCR") and any(one.opname in _FROM_OUTSIDE[:3] for one in span):
            return True
        if each.opname == "LOAD_ATTR" and before is not None:
            is_in_place = each.argval.endswith("_") and not each.argval.endswith("__")
            is_of_others = before.opname in _FROM_OUTSIDE and before.argval not in _LIBRARIES
            is_of_saved = before.opname == "LOAD_FAST" and before.argval in saved
            if (is_in_place and (is_of_others or is_of_saved)) or (each.argval in _CHANGING and is_of_others):
                return True
    return any(_writes(inner) for inner in code.co_consts if isinstance(inner, types.CodeType))
