"""Whether a function computes its result and does nothing else, as far as its code shows: one whose results are remembered may be left out of a second run then."""

import re
import types
from collections.abc import Iterator
from typing import Any

import torch

from tightfit.effects.bytecode.instructions import instructions_of
from tightfit.effects.users_code import is_users_file

_WRITES = frozenset(
    ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF", "DELETE_DEREF", "STORE_ATTR", "DELETE_ATTR", "YIELD_VALUE")
)
# Names of what draws random numbers, changes what it is called on, or finds objects in ways of its own.
_DOES_MORE = re.compile(
    r"rand|drop|normal|uniform|bernoulli|multinomial|poisson|exponential|shuffle|choice|sample|seed|generator|"
    r"^(append|extend|insert|add|update|setdefault|pop|popleft|popitem|remove|discard|clear|put|send|write|next|print|open|"
    r"exec|eval|setattr|getattr|globals|locals|vars|import_module|register_.*)$"
)
_CONSTANTS = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_MOST_DEPTH = 8


def computes_only(function: Any, depth: int = 0) -> bool:
    """Whether the code of a function, and of the user's functions that it names, draws no random numbers and writes to nothing but its own variables.

    False where that is not seen, also of a function that is not written in Python.
    """
    if not isinstance(function, types.FunctionType) or function.__closure__ or depth > _MOST_DEPTH:
        return False
    named = set[str]()
    for code in _codes(function.__code__):
        if any(each.opname in _WRITES for each in instructions_of(code)):
            return False
        named.update(code.co_names)
    if any(_DOES_MORE.search(name) for name in named):
        return False
    space = function.__globals__
    return all(_is_plain(space[name], function, depth) for name in named if name in space)


def _is_plain(value: Any, by: types.FunctionType, depth: int) -> bool:
    """Whether a global of that function is a constant, a library's function, class or module, or a function that computes only."""
    if isinstance(value, types.FunctionType) and is_users_file(value.__code__.co_filename):
        return value is by or computes_only(value, depth + 1)
    if isinstance(value, type):
        return value.__module__.partition(".")[0] in ("builtins", "torch", "numpy", "math")
    return isinstance(value, (*_CONSTANTS, types.FunctionType, types.BuiltinFunctionType, types.ModuleType))


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
