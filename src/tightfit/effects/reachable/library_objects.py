"""State of a program's in what belongs to libraries: attributes that its code puts on their modules, classes, loggers and threads, and containers of their objects."""

import dataclasses
import logging
import random
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any

import numpy as np
import torch

from tightfit.effects.code import CODE
from tightfit.effects.holders import Names
from tightfit.effects.reachable.classes_of_libraries import COUNTING
from tightfit.effects.users_code import is_users_module, module_of

_FOLLOWED = (
    *(torch.Tensor, list, dict, set, deque, torch.optim.Optimizer),
    *(torch.Generator, np.random.Generator, np.random.RandomState, random.Random),
)


def is_followed(value: Any) -> bool:
    """Whether an attribute of a library's object is looked at as state: containers, tensors, generators, and what counts steps."""
    return isinstance(value, _FOLLOWED) or module_of(type(value)) in COUNTING


def made_by(kind: type) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The functions that make the fields of a dataclass's new objects, by the names of the fields."""
    for name, field in vars(kind).get("__dataclass_fields__", {}).items():
        if field.default_factory is not dataclasses.MISSING:
            yield name, field.default_factory


class _ClassNames(MutableMapping[str, Any]):
    """The attributes of a class, as a dict that can be written to."""

    def __init__(self, kind: type) -> None:
        self._kind = kind

    def __getitem__(self, name: str) -> Any:
        return vars(self._kind)[name]

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self._kind, name, value)

    def __delitem__(self, name: str) -> None:
        delattr(self._kind, name)

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self._kind))

    def __len__(self) -> int:
        return len(vars(self._kind))

    def __contains__(self, name: object) -> bool:
        return name in vars(self._kind)


class StoredOnLibraries:
    """The modules, classes and objects of libraries that a walk has met, for the attributes that the region's code puts on them."""

    def __init__(self) -> None:
        self._stored = set[str]()
        self._owners: dict[int, tuple[str, Any]] = {}
        # With the names that were looked for in them.
        self._modules: dict[int, frozenset[str]] = {}
        self._finds_modules = False

    def code(self, attributes: frozenset[str], stored: frozenset[str], *, finds_modules: bool) -> None:
        """What a function of the region names, and the attributes that it sets."""
        self._stored |= stored
        self._finds_modules |= finds_modules
        if "getLogger" in attributes:
            # The first of each name is there when the walk is made, if anything was put on it.
            for name, logger in [("root", logging.root), *logging.root.manager.loggerDict.items()]:
                self.met(f"logging.{name}", logger)
        if attributes & {"current_thread", "main_thread"}:
            for thread in (threading.main_thread(), threading.current_thread()):
                self.met(f"thread {thread.name}", thread)

    def met(self, path: str, owner: Any) -> None:
        """A module, a class or an object of a library."""
        self._owners.setdefault(id(owner), (path, owner))

    def met_module(self, module: types.ModuleType, attributes: frozenset[str]) -> None:
        """A Python module of a library, with the classes and modules in it that code names."""
        if id(module) in self._modules and attributes <= self._modules[id(module)]:
            return
        self._modules[id(module)] = self._modules.get(id(module), frozenset()) | attributes
        self.met(module.__name__, module)
        for name in attributes & vars(module).keys():
            value = vars(module)[name]
            if isinstance(value, types.ModuleType) and not is_users_module(value):
                self.met_module(value, attributes)
            elif isinstance(value, type) or _has_attributes(value):
                self.met(f"{module.__name__}.{name}", value)

    def holders(self, known: Callable[[], Iterable[str]]) -> Iterator[Names]:
        """Those of the attributes on them that the code sets; what is not there yet too, where nothing else in the region has it: `known` gives those names."""
        if not self._stored or not (self._owners or self._finds_modules):
            return
        unknown = self._stored.difference(known())
        if self._finds_modules:
            for module in list(sys.modules.values()):
                if isinstance(module, types.ModuleType) and is_users_module(module):
                    self.met(module.__name__, module)
        for path, owner in self._all_met():
            space: Any = _ClassNames(owner) if isinstance(owner, type) else getattr(owner, "__dict__", None)
            if space is None:
                continue
            there = {name for name in self._stored if name in space and not isinstance(space[name], CODE)}
            if names := there | {name for name in unknown if name not in space}:
                yield Names(path, (id(owner), "stored"), _giving(space), only=tuple(sorted(names)), is_attributes=True)

    def _all_met(self) -> Iterator[tuple[str, Any]]:
        """What was met, and what is met in what hangs on it while this is gone through."""
        number = 0
        while number < len(self._owners):
            for each in list(self._owners.values())[number:]:
                number += 1
                yield each


def _has_attributes(value: Any) -> bool:
    """Whether a library's object, its root logger say, takes attributes of anybody's."""
    return not isinstance(value, CODE) and isinstance(getattr(value, "__dict__", None), dict)


def _giving(space: Any) -> Callable[[], Any]:
    return lambda: space
