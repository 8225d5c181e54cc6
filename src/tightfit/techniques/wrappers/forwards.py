"""Puts code around the `forward` of one module object, so that nothing else of the module is different.

The wrapper lives in the module's own `__dict__`: hooks, submodules, parameters and `state_dict` keys stay what they are. A copy of the module
(an EMA, say) wraps the copy and not the original, a module that is pickled whole is pickled without it, and `inspect.signature` sees the
module's own signature. A wrapper is taken off by itself: what somebody else has put around it or in its place stays.
"""

import contextlib
import copy
import functools
import inspect
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
# The threads that are inside of `plain_forwards`. No context variable, which code that torch compiles cannot read.
_PLAIN_IN: set[int] = set()


@contextlib.contextmanager
def plain_forwards() -> Iterator[None]:
    """For the time, wrapped forwards run what would run without any wrapper: for proofs about the model itself."""
    thread = threading.get_ident()
    was_inside = thread in _PLAIN_IN
    _PLAIN_IN.add(thread)
    try:
        yield
    finally:
        if not was_inside:
            _PLAIN_IN.discard(thread)


def are_forwards_plain() -> bool:
    """Whether this is inside of `plain_forwards`."""
    return bool(_PLAIN_IN) and threading.get_ident() in _PLAIN_IN


class OnlyHere:
    """Code around a forward, or what has a method that is, that belongs to one module and its session: copies of the module do without it."""

    __slots__ = ()


def through(forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """What is around a forward where nothing is."""
    return forward(*args, **kwargs)


def run_for(_: torch.nn.Module, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Calls a function that stands as the `forward` of a module and does not say of which."""
    return function(*args, **kwargs)


class WrappedForward:
    """The `forward` of `module` with `around(forward, *args, **kwargs)` in its place; `previous` is what the module's `__dict__` had.

    `is_copied` in a copy of a module, whose wrappers no session knows.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        around: Around,
        previous: Callable[..., Any] | None,
        *,
        is_copied: bool = False,
    ) -> None:
        # The module owns the wrapper: a reference back would keep both alive until the next collection of cycles.
        self._module = weakref.ref(module)
        self.around = around
        self.previous = previous
        self.is_copied = is_copied
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
                "the forward of a module is called that the program has dropped; leave out what a plan puts around it"
            )
        return module

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and (other := self._shallow_copy(sys._getframe(1))) is not None:
            take_off_all(other)
            return other.forward(*args, **kwargs)
        return self.inner(*args, **kwargs) if are_forwards_plain() else self.around(self.inner, *args, **kwargs)

    def _shallow_copy(self, caller: types.FrameType) -> torch.nn.Module | None:
        """The module that was called, where that is not this one's but took its attributes along (`copy.copy`, a replica); None as a rule.

        Such a copy has settings of its own, which the forward of the first module would not see.
        """
        # Only of torch's frames: to ask for the variables of one of the program's would keep its tensors alive.
        called = caller.f_locals.get("self") if caller.f_code.co_filename == _CALLS_MODULES else None
        module = self._module()
        if called is None or called is module or not isinstance(called, torch.nn.Module):
            return None
        if module is not None and not _shares_attributes(called, module):
            # A forward that was set on another module by its name runs for the module that it is of.
            return None
        return called

    @property
    def inner(self) -> Callable[..., Any]:
        """What would run without this wrapper; `tightfit.techniques.wrappers.unwrap_model` tells whose it is."""
        module, following = self.module, self._following
        if following is None:
            return functools.partial(type(module).forward, module)
        is_told = isinstance(following, WrappedForward) or getattr(following, "__self__", None) is module
        return following if is_told else functools.partial(run_for, module, following)

    @property
    def _following(self) -> Callable[..., Any] | None:
        """What would run, where it is called without the module."""
        if self.previous is not None or self._is_method:
            return self.previous
        found = inspect.getattr_static(type(self.module), "forward")
        return found.__get__(self.module, type(self.module)) if hasattr(found, "__get__") else found

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """As `functools.wraps` has it, for Accelerate, which follows it to the function that is to be the module's `forward` again."""
        return type(self.module).forward if self.previous is None else self.previous

    @property
    def __signature__(self) -> inspect.Signature:
        following = self._following
        return inspect.signature(self.inner if following is None else following)

    def put_on(self) -> None:
        """Has the module call this."""
        vars(self.module)["forward"] = self

    def take_off(self) -> None:
        """Has the module do without this, wherever it is by now: where somebody else calls it, it does nothing any more."""
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
        module, previous = copy.deepcopy(self.module, memo), self.previous
        if isinstance(previous, types.MethodType | WrappedForward):
            previous = copy.deepcopy(previous, memo)
        if self.around is through or isinstance(getattr(self.around, "__self__", self.around), OnlyHere):
            return types.MethodType(type(module).forward, module) if previous is None else previous
        # Code that is an object of its own may belong to the module; a function is shared, as functions are.
        around = copy.deepcopy(self.around, memo) if hasattr(self.around, "__deepcopy__") else self.around
        return WrappedForward(module, around, previous, is_copied=True)

    def __reduce__(self) -> tuple[Any, ...]:
        # By name: the type of bound methods has no name that pickle finds.
        return (getattr, (self.module, "forward"))


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
    """What stands as `forward` on the module object itself; None where the class's own is called, also by its name in a copy."""
    current = vars(module).get("forward")
    if isinstance(current, types.MethodType) and current.__self__ is module:
        return None if current.__func__ is type(module).forward else current
    return current


def wrap_forward(module: torch.nn.Module, around: Around) -> WrappedForward:
    """The wrapper around what `module` has as its `forward`; it is not on yet."""
    return WrappedForward(module, around, own_forward(module))


def copied_wrappers(model: torch.nn.Module) -> dict[torch.nn.Module, WrappedForward]:
    """The wrappers that came with `model` when a model with a plan was copied: the outermost one of each module."""
    outermost = {module: vars(module).get("forward") for module in model.modules()}
    return {m: f for m, f in outermost.items() if isinstance(f, WrappedForward) and f.is_copied}


def take_off_copied(module: torch.nn.Module) -> None:
    """Has `module` do without the wrappers that came with it when a model with a plan was copied."""
    current = vars(module)["forward"]
    while isinstance(current, WrappedForward) and current.is_copied:
        current = current.previous
    if current is None:
        del vars(module)["forward"]
    else:
        vars(module)["forward"] = current
