"""The functions that a module's forward runs, and the names that they are found by, to detect when one of them is replaced."""

import operator
import types
from collections.abc import Iterable, Mapping
from typing import Any

from tightfit.effects.identities import identities
from tightfit.effects.users_code import is_users_class

CODE = (types.FunctionType, types.BuiltinFunctionType, type, types.ModuleType)
_CODE_OF = operator.attrgetter("__code__")


class Code:
    """What a walk has found of code; `is_same` says whether each name still stands for the same function."""

    def __init__(self) -> None:
        self._places: dict[int, tuple[Mapping[str, Any], dict[str, Any]]] = {}
        # What `vars` gives of a class is made anew each time.
        self._classes: dict[type, Mapping[str, Any]] = {}
        self._functions: dict[types.FunctionType, types.CodeType] = {}
        # What is compared in each call: a look-up, names, what they stood for, and the identities of that.
        self._compared: list[tuple[Any, tuple[str, ...], tuple[Any, ...], Any]] | None = None

    def named(self, space: Mapping[str, Any], names: Iterable[str]) -> None:
        """Keeps what those of `names` stand for in `space` that are code."""
        self._keep(space, {name: space[name] for name in names if isinstance(space.get(name), CODE)})

    def method(self, kind: type, name: str) -> None:
        """Keeps the methods that a class and its bases have by this name, to which `super()` leads too, and that the classes before the first one have none."""
        is_found = False
        for base in kind.__mro__[:-1]:
            space = self._classes.setdefault(base, vars(base))
            # Behind it a library's class may well be without: nobody puts a method there that none of them had.
            if name in space or not is_found or is_users_class(base):
                self._keep(space, {name: space.get(name)})
            is_found = is_found or name in space

    def function(self, function: types.FunctionType) -> None:
        """Keeps the code of a function, which a program may exchange too."""
        self._functions[function] = function.__code__

    def is_same(self) -> bool:
        """Whether nothing was replaced."""
        if self._compared is None:
            self._compared = [
                (space.get, tuple(values), held := tuple(values.values()), identities(held))
                for space, values in self._places.values()
            ]
        for get, names, _, same in self._compared:
            # Kept by a name while it is read.
            now = tuple(map(get, names))
            if identities(now) != same:
                return False
        return all(map(operator.is_, map(_CODE_OF, self._functions), self._functions.values()))

    def _keep(self, space: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        self._compared = None
        self._places.setdefault(id(space), (space, {}))[1].update(values)
