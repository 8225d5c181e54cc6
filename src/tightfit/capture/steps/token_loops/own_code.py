"""Code of the program's own that runs in each turn of a loop of a library: it may count the turns, and do something else in some of them."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tightfit.capture.observe.attribution import is_user_file

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_PLAIN = (bool, int, float, str, type(None))


def has_own_hooks(model: torch.nn.Module) -> bool:
    """Whether the program is told of calls of a part of `model`."""
    return any(
        _is_own(hook) for module in model.modules() for name in _HOOKS for hook in getattr(module, name, {}).values()
    )


def own_attributes(model: torch.nn.Module) -> tuple[tuple[str, Any], ...]:
    """Plain attributes of those modules in `model` whose classes are the program's own, and the lengths of its lists and dictionaries."""
    return tuple(
        found
        for path, module in model.named_modules()
        if _is_own(type(module).forward)
        for found in _attributes(path, module)
    )


def _attributes(path: str, module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        if isinstance(value, _PLAIN):
            yield f"{path}.{name}", value
        elif isinstance(value, list | dict | set) and not name.startswith("_"):
            yield f"{path}.{name}", len(value)


@functools.cache
def _is_own(function: Callable[..., Any]) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
    if code is not None:
        return is_user_file(code.co_filename)
    # An object that is called.
    file = getattr(sys.modules.get(type(function).__module__), "__file__", None)
    return isinstance(file, str) and is_user_file(file)
