"""Libraries that were imported before the virtual card was there, in the process that traces are forked from.

What they took by `from torch import save` is torch's own function, where a program that imports them in a trace gets the virtual card's. So it is
noted which functions and classes they refer to; once the card is there, those for which the modules that they are from have others by then are exchanged.
Answers that they remember of what there is are forgotten.
"""

import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

from tightfit.capture.patches import eager, libraries
from tightfit.capture.targets.library_imports import LIBRARIES

# What a name of a library refers to: the dict that has it, its key, and the object.
_Held = tuple[dict[Any, Any], Any, Any]

_REMEMBERS = type(functools.cache(len))
_EXCHANGED = (types.FunctionType, types.BuiltinFunctionType, type)

_held: list[_Held] = []
_owners: dict[int, list[tuple[types.ModuleType, str]]] = {}


def begin() -> None:
    """Prepares for imports, as a trace does before its program imports anything."""
    eager.keep_compiler_out()
    libraries.read_lists_from_their_begin()


def note() -> None:
    """Notes what the libraries that are imported by now refer to.

    Ends the process where they have imported code of the user's, which is compiled with checks in its loops in a trace.
    """
    if libraries.is_code_of_the_users_imported():
        raise SystemExit(1)
    _held[:] = _held_by_libraries()
    held = {id(value) for _, _, value in _held}
    _owners.clear()
    for module in list(sys.modules.values()):
        if not isinstance(module, types.ModuleType):
            continue
        for name, value in list(vars(module).items()):
            if id(value) in held:
                _owners.setdefault(id(value), []).append((module, name))


def exchange() -> None:
    """Gives the libraries what the modules hold now under the names that their objects had."""
    new: dict[int, Any] = {}
    for number, places in _owners.items():
        # The shortest name first: `torch.save`, and not the module that it comes from.
        for module, name in sorted(places, key=lambda place: len(place[0].__name__)):
            value = vars(module).get(name)
            if value is not None and id(value) != number:
                new[number] = value
                break
    for names, key, value in _held:
        if id(value) in new:
            names[key] = new[id(value)]
    for answer in _remembered():
        answer.cache_clear()
    _held.clear()
    _owners.clear()


def _held_by_libraries() -> Iterator[_Held]:
    """Functions and classes that libraries have as globals, or in tables that are globals."""
    for names in _globals_of_libraries():
        for key, value in list(names.items()):
            tables = [(names, key, value)]
            # Not their own kinds of dicts, some of which import what they are asked for.
            if type(value) is dict and key != "__builtins__":
                tables = [(value, inner, each) for inner, each in value.items()]
            for table, inner, each in tables:
                if isinstance(each, _EXCHANGED):
                    yield table, inner, each


def _remembered() -> Iterator[Any]:
    """The functions of libraries that keep their answer to what there is: a card, a kernel, another library."""
    for names in _globals_of_libraries() if _held else ():
        for key, value in list(names.items()):
            if isinstance(value, _REMEMBERS) and ("available" in str(key) or str(key).startswith("is_")):
                yield value


def _globals_of_libraries() -> Iterator[dict[str, Any]]:
    for name, module in list(sys.modules.items()):
        if isinstance(module, types.ModuleType) and _is_of_library(name):
            yield vars(module)


def _is_of_library(name: str) -> bool:
    return name.partition(".")[0] in LIBRARIES
