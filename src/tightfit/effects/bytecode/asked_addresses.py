"""Whether hooks of the program's for saved tensors tell these apart by where they lie in memory: a quantiser that leaves weights alone knows
them by `data_ptr()`, which it has asked for beforehand. A weight that is streamed lies elsewhere in each pass.
"""

import functools
import inspect
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

from tightfit.effects.bytecode.asked_of_saved import called
from tightfit.effects.bytecode.instructions import instructions_of
from tightfit.effects.users_code import FILES_OF_TORCH

_ADDRESSES = frozenset(
    [
        "data_ptr",
        "untyped_storage",
        "storage",
        "_cdata",
        "ctypes",
        "__array_interface__",
        "__cuda_array_interface__",
        "is_set_to",
    ]
)


def line_with_address(hook: Any) -> str:
    """The line where a hook, or a function of the program's or method of its class that it calls, asks where a tensor lies; or nothing."""
    seen = set[int]()
    waiting = list(_functions_of(hook))
    while waiting:
        function, owner = waiting.pop()
        for one, _ in called(function):
            if id(one.__code__) in seen:
                continue
            seen.add(id(one.__code__))
            if line := _line_in(one.__code__):
                return f"{Path(one.__code__.co_filename).name}:{line}"
            methods = (getattr(owner, name, None) for name in _names_in(one.__code__)) if owner is not None else ()
            waiting += [(method, owner) for method in methods if _is_not_torchs(method)]
    return ""


def _functions_of(hook: Any) -> Iterator[tuple[types.FunctionType, type | None]]:
    """With the class whose methods it may call."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    if isinstance(hook, types.MethodType):
        owner = hook.__self__ if isinstance(hook.__self__, type) else type(hook.__self__)
        hook = hook.__func__
    elif isinstance(hook, types.FunctionType):
        owner = None
    else:
        owner = type(hook)
        hook = getattr(owner, "__call__", None)  # noqa: B004
    hook = inspect.unwrap(hook) if hook is not None else None
    if _is_not_torchs(hook):
        yield hook, owner


def _is_not_torchs(value: Any) -> TypeGuard[types.FunctionType]:
    return isinstance(value, types.FunctionType) and not value.__code__.co_filename.startswith(FILES_OF_TORCH)


@functools.lru_cache(maxsize=1024)
def _names_in(code: types.CodeType) -> frozenset[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(code.co_names).union(*map(_names_in, inner))


@functools.lru_cache(maxsize=1024)
def _line_in(code: types.CodeType) -> int | None:
    for each in instructions_of(code):
        if each.argval in _ADDRESSES and each.opname in ("LOAD_ATTR", "LOAD_CONST"):
            return each.line
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return next(filter(None, map(_line_in, inner)), None)
