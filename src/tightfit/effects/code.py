"""The functions that a module's forward runs, and the names that they are found by, to detect when one of them is replaced."""

import builtins
import functools
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tightfit.effects.identities import identities
from tightfit.effects.users_code import is_users_class, without_ours

CODE = (types.FunctionType, types.BuiltinFunctionType, type, types.ModuleType)
# What of an object of code a program may exchange, each compared by identity.
_PARTS_OF_FUNCTIONS = tuple(map(operator.attrgetter, ("__code__", "__defaults__", "__kwdefaults__")))
_parts_of_partial = operator.attrgetter("func", "args", "keywords")
_PARTS_OF_CLASSES = (operator.attrgetter("__mro__"),)


class Code:
    """What a walk has found of code; `is_same` says whether each name still stands for the same function."""

    def __init__(self) -> None:
        self._places: dict[int, tuple[Mapping[str, Any], dict[str, Any]]] = {}
        # What `vars` gives of a class is made anew each time.
        self._classes: dict[type, Mapping[str, Any]] = {}
        # By what is asked of them: objects of code, and what it gave.
        self._parts: dict[Callable[[Any], Any], tuple[list[Any], list[Any]]] = {}
        self._with_parts = set[int]()
        # Not kept alive: a module of the region may be among them.
        self._classes_of: list[tuple[weakref.ref[Any], type]] = []
        self._partials: list[tuple[weakref.ref[Any], Any]] = []
        # What is compared in each call: a look-up, names, what they stood for, and the identities of that.
        self._compared: list[tuple[Any, tuple[str, ...], tuple[Any, ...], Any]] | None = None

    def named(self, space: Mapping[str, Any], names: Iterable[str]) -> None:
        """Keeps what those of `names` stand for in `space` that are code."""
        self._keep(space, {name: space[name] for name in names if isinstance(space.get(name), CODE)})

    def of_builtins(self, space: Mapping[str, Any], names: Iterable[str]) -> None:
        """Keeps what those of `names` stand for that are found among Python's own, as a module's globals have none of that name."""
        found = [name for name in names if name not in space and name in vars(builtins)]
        if found:
            self._keep(space, dict.fromkeys(found))
            self._keep(vars(builtins), {name: vars(builtins)[name] for name in found})

    def of_class(self, kind: type, names: Iterable[str]) -> None:
        """Keeps what those of `names` stand for in a class itself, also that it has none."""
        space = self._classes.setdefault(kind, vars(kind))
        self._keep(space, {name: space.get(name) for name in names})

    def instance(self, value: Any) -> None:
        """Keeps the class of an object."""
        try:
            self._classes_of.append((weakref.ref(value), type(value)))
        except TypeError:
            # One without a place for weak references has slots, as a rule, and cannot be given another class.
            return

    def method(self, kind: type, name: str) -> None:
        """Keeps the methods that a class and its bases have by this name, to which `super()` leads too, and that the classes before the first one have none."""
        is_found = False
        self._keep_parts(kind, _PARTS_OF_CLASSES)
        for base in kind.__mro__[:-1]:
            space = self._classes.setdefault(base, vars(base))
            # Behind it a library's class may well be without: nobody puts a method there that none of them had.
            if name in space or not is_found or is_users_class(base):
                self._keep(space, {name: space.get(name)})
            is_found = is_found or name in space

    def function(self, function: types.FunctionType) -> None:
        """Keeps the code of a function and its defaults, which a program may exchange too."""
        self._keep_parts(function, _PARTS_OF_FUNCTIONS)
        if function.__kwdefaults__:
            self._keep(function.__kwdefaults__, function.__kwdefaults__)

    def partial(self, value: "functools.partial[Any]") -> None:
        """Keeps what a partial function calls, and with what."""
        self._partials.append((weakref.ref(value), identities(_parts_of_partial(value))))

    def is_same(self) -> bool:
        """Whether nothing was replaced."""
        if self._compared is None:
            self._compared = [
                (space.get, tuple(values), held := tuple(values.values()), identities(held))
                for space, values in self._places.values()
            ]
        for number, (get, names, held, same) in enumerate(self._compared):
            # Kept by a name while it is read.
            now = tuple(map(get, names))
            if identities(now) == same:
                continue
            # This tool's own functions come and go with what they wait for: a new optimizer, a module that is called.
            if not all(map(operator.is_, map(without_ours, held), map(without_ours, now))):
                return False
            self._compared[number] = get, names, now, identities(now)
        for reference, kind in self._classes_of:
            value = reference()
            if value is not None and type(value) is not kind:
                return False
        for reference, same in self._partials:
            value = reference()
            if value is not None and identities(_parts_of_partial(value)) != same:
                return False
        return all(all(map(operator.is_, map(ask, objects), parts)) for ask, (objects, parts) in self._parts.items())

    def _keep(self, space: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        self._compared = None
        self._places.setdefault(id(space), (space, {}))[1].update(values)

    def _keep_parts(self, value: Any, asked: Iterable[Callable[[Any], Any]]) -> None:
        if id(value) in self._with_parts:
            return
        self._with_parts.add(id(value))
        for ask in asked:
            objects, parts = self._parts.setdefault(ask, ([], []))
            objects.append(value)
            parts.append(ask(value))
