"""The functions that a module's forward runs, those of its classes and those that they name, to detect when one of them is replaced."""

import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tightfit.effects.reach import is_users_file

# Methods of `torch.nn.Module` are replaced by tools (and by ourselves) for every module alike; that is no
# change of this model's code.
_PLAIN_BASES = (torch.nn.Module, object)


class Code:
    """The functions at construction; `is_same` says whether they are unchanged."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._places: list[tuple[Mapping[str, Any], str, Any]] = []
        seen: set[tuple[int, str]] = set()
        for kind in {type(part) for part in module.modules()}:
            for base in kind.__mro__:
                if base not in _PLAIN_BASES:
                    for space, name, value in _functions(base):
                        if (id(space), name) not in seen:
                            seen.add((id(space), name))
                            self._places.append((space, name, value))

    def is_same(self) -> bool:
        """Whether each name is still bound to the same object."""
        return all(space.get(name) is value for space, name, value in self._places)


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
