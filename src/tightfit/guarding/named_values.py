"""The attributes that the code of a step names: a function, and the user's functions that it calls."""

import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tightfit.effects.reachable.decorated import users_functions_of
from tightfit.effects.users_code import is_users_file

_MOST_FUNCTIONS = 500


def attributes_named_by(function: Callable[..., Any]) -> set[str]:
    """The attributes that the user's code in `function`, and in what it calls, reads or writes."""
    return {name for each, _ in _functions(function) for code in _codes(each.__code__) for name in code.co_names}


def _functions(function: Any) -> Iterator[tuple[types.FunctionType, Any]]:
    """The functions of the user's code that a step runs, each with the object that it is a method of."""
    waiting, seen = [function], set[int]()
    while waiting and len(seen) < _MOST_FUNCTIONS:
        value = waiting.pop()
        owner = value.__self__ if isinstance(value, types.MethodType) else None
        value = value.__func__ if isinstance(value, types.MethodType) else value
        if isinstance(value, torch.nn.Module):
            waiting += _forwards(value, seen)
            continue
        if not isinstance(value, types.FunctionType):
            owner, value = value, vars(type(value)).get("__call__")
        for own in users_functions_of(value):
            if id(own) in seen:
                continue
            seen.add(id(own))
            yield own, owner
            inner = [*_values(own), *(() if owner is None else _methods(owner, own))]
            waiting += [each for each in inner if isinstance(each, types.FunctionType | types.MethodType)]
            # Models, and what is called like a function.
            waiting += [each for each in inner if isinstance(each, torch.nn.Module) or _is_users(type(each))]


def _forwards(model: torch.nn.Module, seen: set[int]) -> list[types.MethodType]:
    if id(model) in seen:
        return []
    seen.add(id(model))
    classes = {type(part): part for part in model.modules()}
    return [
        types.MethodType(kind.forward, part)
        for kind, part in classes.items()
        if isinstance(kind.forward, types.FunctionType)
    ]


def _methods(owner: Any, function: types.FunctionType) -> list[Any]:
    """The methods of `owner` that one of its methods may call."""
    kind = type(owner)
    names = {name for code in _codes(function.__code__) for name in code.co_names}
    found = [next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None) for name in names]
    return [types.MethodType(each, owner) for each in found if isinstance(each, types.FunctionType)]


def _values(function: types.FunctionType) -> list[Any]:
    names = {name for code in _codes(function.__code__) for name in code.co_names}
    found = [function.__globals__[name] for name in names if name in function.__globals__]
    for cell in function.__closure__ or ():
        # A variable that has no value yet has an empty cell.
        found += [value for value in [_content(cell)] if value is not _EMPTY]
    return [*found, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


_EMPTY = object()


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _is_users(kind: type) -> bool:
    call = vars(kind).get("__call__")
    return isinstance(call, types.FunctionType) and is_users_file(call.__code__.co_filename)
