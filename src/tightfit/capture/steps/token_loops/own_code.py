"""Code of the program's own that runs in each turn of a loop of a library: it may count the turns, anywhere, and do something else in some of them."""

import functools
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

from tightfit.capture.observe.attribution import is_user_file

_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial, staticmethod, classmethod)


def runs_own_code(model: torch.nn.Module) -> bool:
    """Whether a call of `model` runs code of the program's own: hooks, classes, and functions in the place of a library's."""
    return any(map(_is_own, _called(model)))


def _called(model: torch.nn.Module) -> Iterator[Any]:
    of_all = torch.nn.modules.module
    yield from (*of_all._global_forward_hooks.values(), *of_all._global_forward_pre_hooks.values())
    classes = dict[type, None]()
    for module in model.modules():
        yield from (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        yield from (value for value in vars(module).values() if isinstance(value, _FUNCTIONS))
        classes |= dict.fromkeys(type(module).__mro__)
    for each in classes:
        for value in vars(each).values():
            function = value.fget if isinstance(value, property) else value
            if isinstance(function, _FUNCTIONS):
                yield function


def _is_own(function: Any) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
    if code is not None:
        return _is_of_user(code.co_filename)
    # An object that is called.
    file = getattr(sys.modules.get(type(function).__module__), "__file__", None)
    return isinstance(file, str) and _is_of_user(file)


_is_of_user = functools.cache(is_user_file)
