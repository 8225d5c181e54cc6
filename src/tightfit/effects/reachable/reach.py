"""Finds the state that a module's forward can reach: a walk from its modules through attributes, containers, objects, and the user's code.

Code is read, not run: the globals, closures, defaults and class attributes that a user's function names. Code of libraries is taken to keep its
state in modules and in the objects that these refer to. The walk ends after a bounded number of objects; state beyond is found by comparing values.
"""

import abc
import builtins
import enum
import functools
import itertools
import os
import sys
import types
import weakref
from collections import deque
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tightfit.effects.code import CODE
from tightfit.effects.holders import ClassAttributes, Names, class_state, is_plain
from tightfit.effects.outside_calls import NAMES
from tightfit.effects.reachable.cells import Cell, contents
from tightfit.effects.reachable.class_methods import ClassMethods
from tightfit.effects.reachable.classes_of_libraries import BAGS, COUNTING, IN_C, OF_ARRAYS, STATELESS, UNCHANGING
from tightfit.effects.reachable.collected import Collected, Reach
from tightfit.effects.reachable.containers import items_in, tensors_in, wrapped_by
from tightfit.effects.reachable.decorated import decorated_by
from tightfit.effects.reachable.drawn import drawn, hidden, objects_of
from tightfit.effects.reachable.library_functions import (
    MOST_FUNCTIONS,
    code_named_by,
    is_looked_through,
    is_state,
    state_named_by,
)
from tightfit.effects.reachable.library_objects import StoredOnLibraries, is_followed, made_by
from tightfit.effects.reachable.named_in_code import methods_of, named_in
from tightfit.effects.reachable.opaque import functions_of, is_of_c, written_down
from tightfit.effects.reachable.scopes import READS_ENVIRONMENT, Slots, environment, inner_container, scope, slots_of
from tightfit.effects.users_code import is_users_class, is_users_file, is_users_function, is_users_module, module_of

# Of values within values; the stack of Python has a thousand frames, and each takes about four.
_DEEPEST = 64
# Source: torch/nn/modules/module.py, torch 2.6 to 2.13.
_HOOKS_OF_ALL_MODULES = (
    *("_global_forward_pre_hooks", "_global_forward_hooks", "_global_backward_pre_hooks", "_global_backward_hooks"),
    *("_global_parameter_registration_hooks", "_global_buffer_registration_hooks", "_global_module_registration_hooks"),
)
# Objects that are looked at for what they hold, and that may have attributes of their own.
_WITH_CONTENT = (
    torch.Tensor,
    dict,
    list,
    deque,
    tuple,
    set,
    frozenset,
    functools.partial,
    int,
    float,
    str,
    bytes,
    complex,
)
# By which code goes through the modules of another one, or through their parameters.
_GOES_THROUGH = frozenset(
    [
        *("modules", "named_modules", "children", "named_children", "get_submodule", "_modules", "apply"),
        *("parameters", "named_parameters", "buffers", "named_buffers", "get_parameter", "get_buffer"),
    ]
)
_ENDED_BY_HAND = frozenset({"acquire", "__enter__"})
_GRADIENT_HOOKS = frozenset(
    {"register_hook", "register_prehook", "register_multi_grad_hook", "register_post_accumulate_grad_hook", "getattr"}
)
# The attributes that torch gives each module, and where a wrapper of ours stands.
_OF_MODULES = frozenset((*vars(torch.nn.Module()), "forward"))
_LISTS = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)
_CALLED_OF_MODULES = ("__call__", "_wrapped_call_impl", "_call_impl", "__getattr__")
_OF_TENSORS = frozenset(dir(torch.Tensor))
# What code calls by a sign and not by its name.
_OPERATORS = frozenset(
    f"__{way}{name}__"
    for way in ("", "r", "i")
    for name in ("add", "sub", "mul", "truediv", "matmul", "pow", "mod", "floordiv", "and", "or", "xor")
) | {"__neg__", "__getitem__", "__setitem__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"}
_BOUND_IN_C = (types.BuiltinMethodType, types.MethodWrapperType)


def reach_of(module: torch.nn.Module) -> Reach:
    """The state that the forward of `module` can reach now."""
    walk = _Walk({id(part) for part in module.modules()})
    name = type(module).__name__
    for path, part in module.named_modules():
        walk.module(f"{name}.{path}" if path else name, part)
    walk.hooks_of_all_modules()
    walk.finish()
    walk.collected.finish(f"what {name} reaches beyond many objects")
    walk.found.remember()
    return walk.found


def reach_of_arguments(
    arguments: Mapping[str, Any],
    *,
    attributes: frozenset[str] = frozenset(),
    inside: Collection[int] = frozenset(),
    of_libraries: bool = False,
) -> Reach:
    """The state that can be reached from the arguments of a forward, by name; of Python modules among them, what is named by `attributes`.

    Modules `inside`, by `id`, are looked at elsewhere. With `of_libraries`, objects of libraries are looked through as those of the program are: a loop
    may call what it likes of them (the step of an environment), where a forward has them for their settings.
    """
    walk = _Walk(inside, of_libraries=of_libraries)
    walk.named_attributes |= attributes
    for name, argument in arguments.items():
        if isinstance(argument, types.ModuleType):
            walk.python_module(argument, attributes)
        else:
            walk.argument(name, argument)
    walk.finish()
    walk.found.is_cut = walk.collected.has_left_out()
    # They are read once or twice: not looked through before they are asked for.
    walk.found.has_graphs = True
    return walk.found


class _CodeWalk(abc.ABC):
    """The part of a walk that goes through the user's code; `_look` goes on with what the code refers to."""

    def __init__(self, *, is_whole: bool) -> None:
        self.collected = Collected(is_whole=is_whole)
        self._is_whole = is_whole
        self._num_of_libraries = 0
        # All attributes that the code of the region names.
        self.named_attributes = set[str]()
        self.stored = StoredOnLibraries()
        self.reads_any_name = False
        self._depth = 0
        self._waiting: deque[tuple[str, Any]] = deque()
        self._methods = ClassMethods(self.collected.found.code)

    @abc.abstractmethod
    def _look(self, path: str, value: Any) -> None:
        """Looks at a value of any type."""

    def value(self, path: str, value: Any) -> None:
        """A value of any type. What lies deep (a list of nodes that each have the next one) waits, so that Python's stack is enough for all of it."""
        if self._depth == _DEEPEST:
            self._waiting.append((path, value))
            return
        self._depth += 1
        try:
            self._look(path, value)
            while self._depth == 1 and self._waiting:
                self._look(*self._waiting.popleft())
        finally:
            self._depth -= 1

    def users_class(self, kind: type, path: str) -> None:
        """The code of a class's `forward`, and of the methods that it calls on `self`; of a helper's class, all methods."""
        self._methods.look_at(self, kind, methods_of(kind))
        for base in kind.__mro__:
            if is_users_class(base) and self.collected.is_new(base):
                self.collected.hold(ClassAttributes(base.__name__, base), is_other=True)
                for name, value in itertools.chain(class_state(base).items(), made_by(base)):
                    self.value(f"{base.__name__}.{name}", value)
        if is_users_class(type(kind)):
            self.users_class(type(kind), path)

    def function(self, path: str, function: types.FunctionType) -> None:
        """A function: the globals, closures, defaults and attributes that it names."""
        if not self.collected.is_new(function):
            return
        if is_users_file(function.__code__.co_filename):
            self._attributes_of(path, function)
            self._own_function(path, function)
            return
        for number, inner in enumerate(decorated_by(function)):
            if not number:
                self._attributes_of(path, function)
            self.value(path, inner)
        if self._is_whole and is_looked_through(function.__module__) and self._num_of_libraries < MOST_FUNCTIONS:
            self._num_of_libraries += 1
            if names := state_named_by(function):
                self._named_in(function.__module__ or "", function.__globals__, names)
            for value in code_named_by(function):
                self._librarys_code(value)

    def _librarys_code(self, value: Any) -> None:
        """A function of a library, or a class, for what its code counts on it."""
        if isinstance(value, types.FunctionType):
            self.function(value.__name__, value)
        elif self._is_whole and is_looked_through(module_of(value)) and self.collected.is_new(value):
            if class_state(value) and not issubclass(value, torch.nn.Module):
                self.collected.hold(ClassAttributes(value.__name__, value), is_other=True)
                for name, inner in class_state(value).items():
                    if is_state(inner):
                        self.value(f"{value.__name__}.{name}", inner)
            for name, method in list(vars(value).items()):
                if isinstance(method, types.FunctionType):
                    self.function(f"{value.__name__}.{name}", method)

    def _named_in(self, path: str, space: dict[str, Any], names: tuple[str, ...]) -> None:
        self.collected.hold(Names(path, (id(space), names), lambda: space, only=names), is_other=True)
        for name in names:
            self.value(f"{path}.{name}", space[name])

    def _own_function(self, path: str, function: types.FunctionType) -> None:
        named = named_in(function.__code__)
        names, attributes, imported = named.names, named.attributes, named.imported
        self.named_attributes |= attributes
        self.reads_any_name |= named.reads_all_attributes
        self.stored.code(attributes, named.stored, finds_modules=named.finds_modules)
        self.collected.found.ends_by_hand |= not named.attributes.isdisjoint(_ENDED_BY_HAND)
        self.collected.found.names_gradient_hooks |= not _GRADIENT_HOOKS.isdisjoint(names | attributes)
        self.collected.found.names_outside |= not NAMES.isdisjoint(names | attributes | imported)
        space = function.__globals__
        if named.reads_all_globals:
            names |= {name for name, value in space.items() if not (name.startswith("__") or isinstance(value, CODE))}
        # Functions, classes and modules that a function names are code; whether they are replaced is watched by
        # `code`.
        plain = tuple(sorted(n for n in names if n not in space or not isinstance(space[n], CODE)))
        plain = tuple(n for n in plain if n in space or n not in vars(builtins))
        module = function.__module__ or ""
        self.collected.found.code.function(function)
        self.collected.found.code.named(space, names)
        self.collected.found.code.of_builtins(space, names)
        if plain:
            self.collected.hold(Names(module, (id(space), plain), lambda: space, only=plain), is_other=True)
        for name in names:
            # The program may have put a function of its own among Python's.
            value = space[name] if name in space else vars(builtins).get(name)
            if isinstance(value, types.ModuleType):
                self.python_module(value, attributes, of_all=named.reads_all_attributes)
            elif name in space or is_users_function(value):
                self.value(f"{module}.{name}", value)
        for name in imported:
            if isinstance(module_named := sys.modules.get(name), types.ModuleType):
                self.python_module(module_named, attributes, of_all=named.reads_all_attributes)
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if variable != "__class__" and self.collected.is_new(cell):
                self.collected.hold(Cell(f"{path}:{variable}", cell), is_other=True)
                for value in contents(cell):
                    self.value(f"{path}:{variable}", value)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.value(f"{path}()", value)

    def _attributes_of(self, path: str, function: types.FunctionType) -> None:
        if not self.collected.is_new(vars(function)):
            return
        if not vars(function):
            self.collected.found.empty.append(vars(function))
            return
        self.collected.hold_dict(path, vars(function), is_attributes=True)
        for name, value in list(vars(function).items()):
            # Of `functools.singledispatch`: what it has found in its registry for the classes that it has met, tensors of a proof among them.
            if name != "_clear_cache":
                self.value(f"{path}.{name}", value)

    def python_module(self, module: types.ModuleType, attributes: frozenset[str], *, of_all: bool = False) -> None:
        """A Python module: the environment, or what code names of a module of the user's; with `of_all` whatever it has that is no code."""
        if module is os and attributes & READS_ENVIRONMENT and self.collected.is_new(os.environ):
            self.collected.hold(environment(), is_other=True)
        self.collected.found.code.named(vars(module), attributes)
        if not is_users_module(module):
            self._put_in_library(module, attributes)
            self.stored.met_module(module, attributes)
            return
        given = {n for n in vars(module) if not n.startswith("__")} if of_all else attributes & vars(module).keys()
        named = tuple(sorted(n for n in given if not isinstance(vars(module)[n], CODE)))
        self._named_in(module.__name__, vars(module), named)
        # What its functions name in turn.
        for name in sorted(attributes & vars(module).keys()):
            if isinstance(vars(module)[name], types.FunctionType):
                self.value(f"{module.__name__}.{name}", vars(module)[name])

    def _put_in_library(self, module: types.ModuleType | type, attributes: frozenset[str] | None) -> None:
        """The user's own functions in a library's module or class, in the place of the library's; `attributes` are the names to look at, None for all."""
        names = vars(module).keys() if attributes is None else attributes & vars(module).keys()
        for name in sorted(names):
            value = vars(module)[name]
            if is_users_function(value):
                self.value(f"{module.__name__}.{name}", value)
        if self._is_whole and isinstance(module, types.ModuleType) and is_looked_through(module.__name__):
            there = [(name, vars(module)[name]) for name in sorted(names)]
            self._named_in(module.__name__, vars(module), tuple(name for name, value in there if is_state(value)))
            for _, value in there:
                if isinstance(value, types.FunctionType | type):
                    self._librarys_code(value)


class _Walk(_CodeWalk):
    """One walk; `inside` are the modules of the region, whose children are walked through as well."""

    def __init__(self, inside: Collection[int], *, of_libraries: bool = False) -> None:
        super().__init__(is_whole=of_libraries)
        self.found = self.collected.found
        self._inside = inside
        self._of_libraries = of_libraries
        self._outside: list[tuple[str, torch.nn.Module]] = []
        # Python modules that are found otherwise than by a global name: in closures, attributes, containers and defaults.
        self._python_modules: dict[int, types.ModuleType] = {}

    def finish(self) -> None:
        """Walks through the modules outside of the region, as far as code of the region names what they hold: the whole model may be among them."""
        flags = None
        while flags is None or self._methods.look_at_others(self):
            done = (-1, -1, -1)
            while done != (done := (len(self.named_attributes), len(self._outside), len(self._python_modules))):
                for held in list(self._python_modules.values()):
                    self.python_module(held, frozenset(self.named_attributes), of_all=self.reads_any_name)
                for path, module in list(self._outside):
                    _found_by_others(self, path, module)
                    for name, value in [*vars(module).items(), *module._modules.items()]:
                        if name in self.named_attributes or (name.isdecimal() and isinstance(module, _LISTS)):
                            self.value(f"{path}.{name}", value)
                self._methods.look_at_named(self, self.named_attributes)
                self._put_in_library(torch.Tensor, frozenset(self.named_attributes | _OPERATORS))
            # Most of what only may run never does: nothing is watched at each call because it is named there.
            flags = flags or (self.found.names_outside, self.found.ends_by_hand)
        self.found.names_outside, self.found.ends_by_hand = flags
        # Of tensors, what the program puts there hides a method that is written in C.
        self.found.code.of_class(torch.Tensor, _OF_TENSORS & (self.named_attributes | _OPERATORS))
        for holder in self.stored.holders(lambda: _names_held(self.found)):
            self.collected.hold(holder, is_other=True)
            for name, value in holder.content(is_kept=False).items():
                self.value(f"{holder.path}.{name}", value)

    def module(self, path: str, module: torch.nn.Module) -> None:
        """A module of the region."""
        if not self.collected.is_new(module):
            return
        self.collected.hold_attributes(path, module)
        for name, value in list(vars(module).items()):
            if isinstance(value, dict) and name.startswith("_") and not value:
                self.found.empty.append(value)
            elif isinstance(value, dict) and name.startswith("_"):
                # Parameters, buffers, children and hooks: `_buffers` is no word that a person looks for.
                shown = path if name in ("_parameters", "_buffers", "_modules") else f"{path}.{name}"
                if self.collected.is_new(value):
                    self.collected.hold_dict(
                        shown, value, is_attributes=shown == path, keeps_graphs=name == "_parameters"
                    )
                for key, inner in list(value.items()):
                    if not isinstance(inner, torch.nn.Module):
                        self.value(f"{shown}.{key}", inner)
            # Our own wrappers stand there while a plan is on the model.
            elif name != "forward":
                self.value(f"{path}.{name}", value)
        self.found.code.instance(module)
        self.users_class(type(module), path)

    def hooks_of_all_modules(self) -> None:
        """The hooks that torch calls for every module of the process, and what the program has put in the place of functions that they call."""
        self._put_in_library(torch.nn.functional, None)
        self._put_in_library(torch.nn.Module, None)
        self.found.code.of_class(torch.nn.Module, _CALLED_OF_MODULES)
        self.found.code.named(vars(torch.nn.functional), vars(torch.nn.functional).keys())
        for name in _HOOKS_OF_ALL_MODULES:
            hooks = vars(torch.nn.modules.module)[name]
            if hooks:
                self.collected.hold_dict(f"torch.nn.{name}", hooks, is_attributes=False)
            else:
                self.found.empty.append(hooks)
            for hook in list(hooks.values()):
                self.value(f"torch.nn.{name}", hook)

    def argument(self, path: str, value: Any) -> None:
        """An argument of the forward; its tensors are watched whether they have a graph or not."""
        # What a step reaches may be a whole data set, whose leaves take seconds to flatten.
        for number, leaf in enumerate(tensors_in(value) if self._of_libraries else tree_leaves(value)):
            if isinstance(leaf, torch.Tensor) and self.collected.is_new(leaf):
                self.found.tensors.append(leaf)
                self.found.tensor_paths.append(path if leaf is value else f"{path}[{number}]")
        self.value(path, value)

    def _look(self, path: str, value: Any) -> None:
        if isinstance(value, type):
            self._class(path, value)
            return
        if isinstance(value, types.ModuleType):
            self._python_modules[id(value)] = value
            return
        if isinstance(value, _BOUND_IN_C):
            # Such as the `pop` of a list, or the `__next__` of an iterator.
            value = value.__self__
        if is_plain(value) or not _can_hold(value):
            return
        if self.collected.is_full():
            self.collected.leave(value)
            return
        if type(value) in weakref.ProxyTypes:
            # Checked first, as a proxy reports the class of its object.
            self.value(path, inner_container(value))
            return
        if isinstance(value, torch.nn.Module):
            # One that is not inside the region: its own attributes, not all that lies below it.
            if id(value) not in self._inside and self.collected.is_new(value):
                self.collected.hold_attributes(path, value)
                self._outside.append((path, value))
                if is_users_class(type(value)):
                    self._methods.look_at(self, type(value), ("forward",))
            return
        if isinstance(value, types.MethodType):
            self.value(path, value.__self__)
            value = value.__func__
        if isinstance(value, types.FunctionType):
            self.function(path, value)
        elif self.collected.is_new(value):
            self._object(path, value)

    def _class(self, path: str, kind: type) -> None:
        """A class of the user's, for what it counts on itself, and where an object of it is made; an enumeration's members may have attributes too."""
        if is_users_class(kind):
            self._methods.may_all_run(kind)
        if not self.collected.is_full() and (not is_users_class(kind) or issubclass(kind, torch.nn.Module)):
            # A class of modules is walked with these; what the code counts on it by its name may be of one that has none in the region.
            self.stored.met(path, kind)
            self._librarys_code(kind)
            return
        if self.collected.is_full():
            return
        self.users_class(kind, path)
        if issubclass(kind, enum.Enum):
            for name, member in kind.__members__.items():
                self.value(f"{path}.{name}", member)

    def _object(self, path: str, value: Any) -> None:
        self.own_attributes(path, value)
        if isinstance(value, torch.Tensor):
            # A tensor with a graph is the result of an earlier operator; its version is checked by autograd
            # itself where it was saved.
            if value.grad_fn is None:
                self.found.tensors.append(value)
                self.found.tensor_paths.append(path)
        elif isinstance(value, dict | list | deque | tuple | set | frozenset):
            self.collected.hold_container(path, value)
            for place, inner in items_in(path, value):
                self.value(place, inner)
        elif (wrapped := wrapped_by(value)) is not None:
            if isinstance(value, functools._lru_cache_wrapper):
                self.found.caches.append((path, value))
            elif isinstance(value, functools.partial):
                self.found.code.partial(value)
            for inner in wrapped:
                self.value(path, inner)
        else:
            self._other(path, value)

    def own_attributes(self, path: str, value: Any) -> None:
        """The attributes of a tensor, a container or a wrapper: a subclass, or the program, may have put some on it."""
        if isinstance(value, _WITH_CONTENT) and is_users_class(type(value)):
            self.users_class(type(value), path)
        own = getattr(value, "__dict__", None) if isinstance(value, _WITH_CONTENT) else None
        if not isinstance(own, dict) or not self.collected.is_new(own):
            return
        if not own:
            self.found.empty.append(own)
            return
        self.collected.hold_dict(path, own, is_attributes=True)
        for name, inner in list(own.items()):
            self.value(f"{path}.{name}", inner)

    def _other(self, path: str, value: Any) -> None:
        if (found := drawn(path, value, is_users_class=is_users_class)) is not None:
            self.found.drawn.append(found)
            for inner in (*functions_of(value), *objects_of(value)):
                self.value(path, inner)
        elif (holder := scope(path, value)) is not None:
            self.collected.hold(holder, is_other=True)
            for name, inner in holder.content(is_kept=False).items():
                self.value(f"{path}.{name}", inner)
        else:
            if self._of_libraries and is_of_c(value):
                if module_of(type(value)).partition(".")[0] not in OF_ARRAYS:
                    self.found.drawn.append(hidden(path, value))
                self.value(path, written_down(value))
            self._instance(path, value)

    def _instance(self, path: str, value: Any) -> None:
        """An object of any other class: its attributes, and the objects that they refer to if the class is the user's."""
        kind = type(value)
        module = module_of(kind)
        origin = module.partition(".")[0]
        if isinstance(value, torch.optim.Optimizer):
            self.found.optimizers.append(weakref.ref(value))
        is_bag = origin in BAGS or module in BAGS
        is_stateless = origin in STATELESS and module not in COUNTING
        if not is_bag and (is_stateless or (origin in sys.stdlib_module_names and not kind.__dictoffset__)):
            if kind.__dictoffset__:
                self.stored.met(path, value)
            elif self._of_libraries and origin.lstrip("_") in IN_C:
                self.found.drawn.append(hidden(path, value))
            return
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict):
            self.collected.hold_dict(path, own, is_attributes=True)
        is_librarys = not is_bag and not is_users_class(kind)
        if is_librarys and (origin in UNCHANGING or not self._of_libraries):
            # Of a library's object (a cache, a configuration): the containers and tensors that are its own, what counts steps, and what is the program's.
            for name, inner in list(own.items()) if isinstance(own, dict) else ():
                if is_followed(inner) or is_users_class(type(inner)):
                    self.value(f"{path}.{name}", inner)
            return
        slots = slots_of(kind)
        if slots:
            self.collected.hold(
                Names(path, (id(value), "slots"), lambda: Slots(value, slots), is_attributes=True), is_other=True
            )
        for name in (*(own or ()), *slots):
            inner = own[name] if own and name in own else getattr(value, name, None)
            self.value(f"{path}.{name}", inner)
        if is_librarys:
            self._librarys_code(kind)
            return
        self.found.code.instance(value)
        self.users_class(kind, path)
        call = vars(kind).get("__call__")
        if isinstance(call, types.FunctionType):
            self.function(f"{kind.__name__}.__call__", call)


def _names_held(found: Reach) -> set[str]:
    return {n for held in found.contents if isinstance(held, dict) for n in held if isinstance(n, str)}


def _can_hold(value: Any) -> bool:
    return not isinstance(value, type | types.ModuleType | types.BuiltinFunctionType | torch.dtype | torch.device)


def _found_by_others(walk: _Walk, path: str, module: torch.nn.Module) -> None:
    """What code finds on a module outside of the region without naming it: by names that are made at run time, or as one of its modules or parameters.

    Its tensors are left out: other code writes to them between the two runs, and what this region does to them shows in its operators.
    """
    if not walk.named_attributes.isdisjoint(_GOES_THROUGH):
        for name, inner in module._modules.items():
            if inner is not None:
                walk.value(f"{path}.{name}", inner)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                walk.own_attributes(f"{path}.{name}", parameter)
    elif not walk.reads_any_name:
        return
    for name, value in list(vars(module).items()):
        if not (name in _OF_MODULES or isinstance(value, torch.Tensor | torch.nn.Module)):
            walk.value(f"{path}.{name}", value)
