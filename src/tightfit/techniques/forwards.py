"""Puts code around the `forward` of one module object, so that nothing else of the module is different.

The wrapper lives in the module's own `__dict__`: hooks, submodules, parameters and `state_dict` keys stay what they are. A copy of the module
(an EMA, say) wraps the copy and not the original, a module that is pickled whole is pickled without it, and `inspect.signature` sees the
module's own signature.
"""

import contextlib
import contextvars
import copy
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

# Called with what comes next, and with the arguments of the module.
Around = Callable[..., Any]

_IS_PLAIN = contextvars.ContextVar("_IS_PLAIN", default=False)


@contextlib.contextmanager
def plain_forwards() -> Iterator[None]:
    """For the time, wrapped forwards run what would run without any wrapper: for proofs about the model itself."""
    token = _IS_PLAIN.set(True)
    try:
        yield
    finally:
        _IS_PLAIN.reset(token)


def are_forwards_plain() -> bool:
    """Whether this is inside of `plain_forwards`."""
    return _IS_PLAIN.get()


class WrappedForward:
    """The `forward` of `module` with `around(forward, *args, **kwargs)` in its place; `previous` is what the module's `__dict__` had."""

    def __init__(self, module: torch.nn.Module, around: Around, previous: Callable[..., Any] | None) -> None:
        # The module owns the wrapper: a reference back would keep both alive until the next collection of cycles.
        self._module = weakref.ref(module)
        self.around = around
        self.previous = previous

    @property
    def module(self) -> torch.nn.Module:
        """The module whose `forward` this is."""
        module = self._module()
        assert module is not None
        return module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs) if _IS_PLAIN.get() else self.around(self.inner, *args, **kwargs)

    @property
    def inner(self) -> Callable[..., Any]:
        """What would run without this wrapper."""
        if self.previous is None:
            return functools.partial(type(self.module).forward, self.module)
        return self.previous

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """As `functools.wraps` has it, for Accelerate, which follows it to the function that is to be the module's `forward` again."""
        return type(self.module).forward if self.previous is None else self.previous

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.inner)

    def __deepcopy__(self, memo: dict[int, Any]) -> "WrappedForward":
        previous = self.previous
        if isinstance(previous, types.MethodType | WrappedForward):
            previous = copy.deepcopy(previous, memo)
        # Code that is an object of its own may belong to the module; a function is shared, as functions are.
        around = copy.deepcopy(self.around, memo) if hasattr(self.around, "__deepcopy__") else self.around
        return WrappedForward(copy.deepcopy(self.module, memo), around, previous)

    def __reduce__(self) -> tuple[Any, ...]:
        # By name: the type of bound methods has no name that pickle finds.
        return (getattr, (self.module, "forward"))


def wrap_forward(module: torch.nn.Module, around: Around) -> WrappedForward:
    """The wrapper that `session.set(module, "forward", ...)` takes."""
    return WrappedForward(module, around, vars(module).get("forward"))
