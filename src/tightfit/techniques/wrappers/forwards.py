"""Wraps the `forward` of one module object, without any other change of the module.

The wrapper is stored in the module's own `__dict__`: hooks, submodules, parameters and `state_dict` keys stay the same. A copy of the module
(an EMA, say) wraps the copy and not the original, a module that is pickled whole is pickled with what it wraps, and `inspect.signature` sees the
module's own signature. A wrapper removes only itself: wrappers and replacements by other code stay.
"""

import contextlib
import copy
import functools
import inspect
import operator
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tightfit.errors import ApplyError

# Called with what comes next, and with the arguments of the module.
Around = Callable[..., Any]

# Torch's own code that calls the forward of a module, which is `self` there.
_CALLS_MODULES = inspect.getfile(torch.nn.Module)
# What a pickle calls to have what is inside of a wrapper: it is read where there is no tightfit, too.
its_first = operator.getitem
# What is read off the `forward` of a module as if it were the method of its class.
_OF_METHODS = frozenset(
    f"__{name}__"
    for name in ("annotations", "code", "defaults", "func", "globals", "kwdefaults", "name", "qualname", "self")
)
# The threads that are inside of `plain_forwards`. No context variable, which code that torch compiles cannot read.
_PLAIN_IN: set[int] = set()


@contextlib.contextmanager
def plain_forwards() -> Iterator[None]:
    """Runs wrapped forwards without their wrappers inside: for proofs about the model itself."""
    thread = threading.get_ident()
    was_inside = thread in _PLAIN_IN
    _PLAIN_IN.add(thread)
    try:
        yield
    finally:
        if not was_inside:
            _PLAIN_IN.discard(thread)


def are_forwards_plain() -> bool:
    """Whether this thread is inside of `plain_forwards`."""
    return bool(_PLAIN_IN) and threading.get_ident() in _PLAIN_IN


class OnlyHere:
    """A wrapper, or an object with a method that is one, that belongs to one module and its session: copies of the module have none."""

    __slots__ = ()


def through(forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """The wrapper that does nothing."""
    return forward(*args, **kwargs)


def run_for(_: torch.nn.Module, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Calls a function that was set as the `forward` of a module and is not bound to it."""
    return function(*args, **kwargs)


class WrappedForward:
    """Replaces the `forward` of `module` by `around(forward, *args, **kwargs)`; `previous` is the former entry of the module's `__dict__`.

    `is_copied` in a copy of a module, whose wrappers belong to no session. What `is_of_model` runs among plain forwards too: without it the module
    does not run at all, as its weights are of another type.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        around: Around,
        previous: Callable[..., Any] | None,
        *,
        is_copied: bool = False,
        is_of_model: bool = False,
    ) -> None:
        # The module owns the wrapper: a reference back would keep both alive until the next collection of cycles.
        self._module = weakref.ref(module)
        self.around = around
        self.previous = previous
        self.is_copied = is_copied
        self._is_of_model = is_of_model
        # A static method, say, is called without the module.
        self._is_method = isinstance(inspect.getattr_static(type(module), "forward", None), types.FunctionType)

    @property
    def module(self) -> torch.nn.Module:
        """The module whose `forward` this is.

        Raises:
            ApplyError: it is gone, and this was kept by its name or in a copy.
        """
        module = self._module()
        if module is None:
            raise ApplyError(
                "the forward of a module is called after the module was freed; leave out the techniques that wrap it"
            )
        return module

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and (other := self._shallow_copy(sys._getframe(1))) is not None:
            take_off_all(other)
            return other.forward(*args, **kwargs)
        is_plain = are_forwards_plain() and not self._is_of_model
        return self.inner(*args, **kwargs) if is_plain else self.around(self.inner, *args, **kwargs)

    def _shallow_copy(self, caller: types.FrameType) -> torch.nn.Module | None:
        """The module that was called, where that is not this one's but took its attributes along (`copy.copy`, a replica); None as a rule.

        Such a copy has settings of its own, which the forward of the first module would not see.
        """
        # Only of torch's frames: to ask for the variables of one of the program's would keep its tensors alive.
        called = caller.f_locals.get("self") if caller.f_code.co_filename == _CALLS_MODULES else None
        return called if isinstance(called, torch.nn.Module) and self.is_of_another(called) else None

    def is_of_another(self, copied: torch.nn.Module) -> bool:
        """Whether a module that has this wrapper has it as a shallow copy of this one's."""
        module = self._module()
        # A forward that was set on another module by its name runs for the module that it is of.
        return copied is not module and (module is None or _shares_attributes(copied, module))

    @property
    def inner(self) -> Callable[..., Any]:
        """The forward inside of this wrapper; `tightfit.techniques.wrappers.unwrap_model` finds its module."""
        module, following = self.module, self._following
        if following is None:
            return functools.partial(type(module).forward, module)
        is_told = isinstance(following, WrappedForward) or getattr(following, "__self__", None) is module
        return following if is_told else functools.partial(run_for, module, following)

    @property
    def _following(self) -> Callable[..., Any] | None:
        """The forward inside, if it is called without the module; else None."""
        if self.previous is not None or self._is_method:
            return self.previous
        found = inspect.getattr_static(type(self.module), "forward")
        return found.__get__(self.module, type(self.module)) if hasattr(found, "__get__") else found

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """As set by `functools.wraps`: Accelerate follows it to the function that it restores as the module's `forward`."""
        return type(self.module).forward if self.previous is None else self.previous

    def __getattr__(self, name: str) -> Any:
        # What a bound method says of itself: programs and torch.export read names of arguments off its code.
        if name not in _OF_METHODS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        module, previous = self.module, vars(self)["previous"]
        found = getattr(type(module), "forward") if previous is None else previous  # noqa: B009 - of the class
        bound = types.MethodType(found, module) if isinstance(found, types.FunctionType) and previous is None else found
        return getattr(bound, name)

    @property
    def __class__(self) -> type:  # type: ignore[override]
        # Code that looks for a forward's source (`inspect.getsource`, `torch.jit.script`) takes methods and functions, and nothing that is called like one.
        is_asked_by_inspect = sys._getframe(1).f_code.co_filename == inspect.__file__
        return types.MethodType if is_asked_by_inspect and hasattr(self, "__func__") else WrappedForward

    @property
    def __signature__(self) -> inspect.Signature:
        following = self._following
        return inspect.signature(self.inner if following is None else following)

    def put_on(self) -> None:
        """Makes the module call this wrapper."""
        vars(self.module)["forward"] = self

    def take_off(self) -> None:
        """Removes this wrapper from the module, also from inside of others; if other code still calls it, it only passes the call on."""
        self.around = through
        module = self._module()
        if module is None:
            return
        outer, current = None, vars(module).get("forward")
        while isinstance(current, WrappedForward) and current is not self:
            outer, current = current, current.previous
        if current is not self:
            return
        if outer is not None:
            outer.previous = self.previous
        elif self.previous is None:
            del vars(module)["forward"]
        else:
            vars(module)["forward"] = self.previous

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        # A forward of the program's own (a partial object, say) is of the copy in the copy, as it would be without this wrapper.
        module, previous = copy.deepcopy(self.module, memo), copy.deepcopy(self.previous, memo)
        if self.around is through or isinstance(getattr(self.around, "__self__", self.around), OnlyHere):
            # A method would stay that of the class as it is now, whatever the program puts on the class later. The entry itself cannot be left out from here.
            return WrappedForward(module, through, None, is_copied=True) if previous is None else previous
        # Code that is an object of its own may belong to the module; a function is shared, as functions are.
        around = copy.deepcopy(self.around, memo) if hasattr(self.around, "__deepcopy__") else self.around
        return WrappedForward(module, around, previous, is_copied=True, is_of_model=self._is_of_model)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.previous is not None:
            return its_first, ((self.previous,), 0)
        # By name: the type of bound methods has no name that pickle finds.
        return getattr, (self.module, "forward")


def _shares_attributes(copied: torch.nn.Module, module: torch.nn.Module) -> bool:
    """Whether a table (of parameters, children, hooks) is one and the same object in both, as a shallow copy leaves it."""
    own = vars(module)
    return any(isinstance(value, dict) and own.get(name) is value for name, value in vars(copied).items())


def take_off_all(module: torch.nn.Module) -> None:
    """Has `module` do without any wrapper, whosever it is."""
    current = vars(module).get("forward")
    while isinstance(current, WrappedForward):
        current = current.previous
    if current is not None:
        vars(module)["forward"] = current
    else:
        vars(module).pop("forward", None)


def own_forward(module: torch.nn.Module) -> Callable[..., Any] | None:
    """The `forward` in the module object's own `__dict__`; None if it is absent or just the class's own method."""
    current = vars(module).get("forward")
    if isinstance(current, types.MethodType) and current.__self__ is module:
        return None if current.__func__ is type(module).forward else current
    return current


def wrap_forward(module: torch.nn.Module, around: Around, *, is_of_model: bool = False) -> WrappedForward:
    """A wrapper around the `forward` of `module`; it is not installed yet. One that came along in a shallow copy is of the first module, and is taken off."""
    current = vars(module).get("forward")
    if isinstance(current, WrappedForward) and current.is_of_another(module):
        take_off_all(module)
    return WrappedForward(module, around, own_forward(module), is_of_model=is_of_model)


def copied_wrappers(model: torch.nn.Module) -> dict[torch.nn.Module, WrappedForward]:
    """The wrappers that were copied along when a model with a plan was copied: the outermost one of each module."""
    outermost = {module: vars(module).get("forward") for module in model.modules()}
    return {m: f for m, f in outermost.items() if isinstance(f, WrappedForward) and f.is_copied}


def take_off_copied(module: torch.nn.Module) -> None:
    """Removes the wrappers that were copied along with `module`."""
    current = vars(module)["forward"]
    while isinstance(current, WrappedForward) and current.is_copied:
        current = current.previous
    if current is None:
        del vars(module)["forward"]
    else:
        vars(module)["forward"] = current
