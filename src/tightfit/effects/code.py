"""The functions that a module's forward runs, those of its classes and those that they name, to detect when one of them is replaced."""

import operator
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tightfit.effects.users_code import is_users_file

# Methods of `torch.nn.Module` are replaced by tools (and by ourselves) for every module alike; that is no
# change of this model's code.
_PLAIN_BASES = (torch.nn.Module, object)


class Code:
    """The functions at construction; `is_same` says whether they are unchanged."""

    def __init__(self, module: torch.nn.Module) -> None:
        found: dict[int, tuple[Mapping[str, Any], dict[str, Any]]] = {}
        for kind in {type(part) for part in module.modules()}:
            for base in kind.__mro__:
                if base not in _PLAIN_BASES:
                    for space, name, value in _functions(base):
                        found.setdefault(id(space), (space, {}))[1][name] = value
        # What torch's own modules call by name.
        functions = vars(torch.nn.functional)
        called = found.setdefault(id(functions), (functions, {}))[1]
        called |= {name: value for name, value in functions.items() if callable(value)}
        self._places = [(space, list(values), list(values.values())) for space, values in found.values()]

    def is_same(self) -> bool:
        """Whether each name is still bound to the same object."""
        return all(all(map(operator.is_, map(space.get, names), values)) for space, names, values in self._places)


def _functions(kind: type) -> Iterator[tuple[Mapping[str, Any], str, Any]]:
    own = kind.__dict__
    for name, value in own.items():
        if isinstance(value, types.FunctionType):
            yield own, name, value
            if is_users_file(value.__code__.co_filename):
                space = value.__globals__
                for used in value.__code__.co_names:
                    if isinstance(space.get(used), types.FunctionType):
                        yield space, used, space[used]
