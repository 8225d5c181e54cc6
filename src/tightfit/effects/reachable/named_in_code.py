"""What the bytecode of a function names: globals, attributes, Python modules."""

import dataclasses
import functools
import types
from collections.abc import Iterator
from typing import Any

import torch

from tightfit.effects.bytecode.instructions import instructions_of
from tightfit.effects.users_code import is_users_class

_GLOBALS = ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL")
_ATTRIBUTES = ("LOAD_ATTR", "STORE_ATTR", "DELETE_ATTR", "IMPORT_FROM")
# By which code reaches globals without naming them, and attributes without naming these.
_ALL_GLOBALS = frozenset({"globals", "exec", "eval"})
_ALL_ATTRIBUTES = frozenset({"getattr", "setattr", "vars", "__dict__", "attrgetter", "methodcaller"})
# By which code sets attributes whose names are constants of it.
_SETS_BY_NAME = frozenset({"setattr", "delattr", "__setattr__", "__delattr__", "vars", "__dict__"})
# By which code finds a Python module at run time.
_FINDS_MODULES = frozenset({"import_module", "__import__", "modules"})
# Run when an object is made or shown, and not by its use.
_MAKING = {
    *("__init__", "__new__", "__init_subclass__", "__class_getitem__"),
    *("__repr__", "__str__", "__reduce__", "__doc__"),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """The names in a code object and in the functions inside it. `stored` are the attributes that it sets, also those that it names by a string."""

    names: frozenset[str]
    attributes: frozenset[str]
    imported: frozenset[str]
    stored: frozenset[str]

    @property
    def reads_all_globals(self) -> bool:
        """Whether it may read a global by a name that is made at run time."""
        return not _ALL_GLOBALS.isdisjoint(self.names)

    @property
    def reads_all_attributes(self) -> bool:
        """Whether it may read an attribute by a name that is made at run time."""
        return not _ALL_ATTRIBUTES.isdisjoint(self.names | self.attributes)

    @property
    def finds_modules(self) -> bool:
        """Whether it may look a Python module up by a name that is made at run time."""
        return not _FINDS_MODULES.isdisjoint(self.names | self.attributes)


@functools.cache
def named_in(code: types.CodeType) -> Named:
    """What a code object names, with the functions inside it."""
    names, attributes, imported, stored = set[str](), set[str](), set[str](), set[str]()
    for instruction in instructions_of(code):
        if instruction.opname in _GLOBALS:
            names.add(instruction.argval)
        elif instruction.opname == "IMPORT_NAME":
            imported.add(instruction.argval)
        elif instruction.opname in _ATTRIBUTES:
            attributes.add(instruction.argval)
        if instruction.opname == "STORE_ATTR":
            stored.add(instruction.argval)
    if not _SETS_BY_NAME.isdisjoint(names | attributes):
        by_name = {text for text in code.co_consts if isinstance(text, str) and text.isidentifier()}
        attributes |= by_name
        stored |= by_name
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = named_in(constant)
            names |= inner.names
            attributes |= inner.attributes
            imported |= inner.imported
            stored |= inner.stored
    return Named(
        names=frozenset(names),
        attributes=frozenset(attributes),
        imported=frozenset(imported),
        stored=frozenset(stored),
    )


def methods_of(kind: type) -> list[str]:
    """The methods that others may call: of a module, `forward` and what Python's own syntax calls; of other classes of the user's, all."""
    is_module = issubclass(kind, torch.nn.Module)
    names = {name for base in kind.__mro__ if is_users_class(base) for name in vars(base)}
    chosen = {n for n in names if not is_module or (n.startswith("__") and n.endswith("__"))}
    return sorted((chosen | {"forward"}) - _MAKING)


def all_methods_of(kind: type) -> frozenset[str]:
    """The methods of the program's own that a class has, also those that run where an object of it is made or shown."""
    return frozenset(name for base in kind.__mro__ if is_users_class(base) for name in vars(base))


def functions_behind(attribute: Any) -> Iterator[Any]:
    """The functions that run where an attribute of a class is used; the attribute itself where it is a function, or nothing of Python's own that wraps some."""
    if isinstance(attribute, staticmethod | classmethod):
        inner = [attribute.__func__]
    elif isinstance(attribute, property):
        inner = [attribute.fget, attribute.fset, attribute.fdel]
    elif isinstance(attribute, functools.cached_property | functools.partialmethod):
        inner = [attribute.func]
    elif isinstance(attribute, functools.singledispatchmethod):
        inner = [attribute.func, *attribute.dispatcher.registry.values()]
    else:
        yield attribute
        return
    for each in inner:
        yield from functions_behind(each)
