"""Models that a program calls, optimizers that it makes, and steps of a framework's loop, told to those who wait for them.

Nothing is changed in what is called: its owners are told before a call, or after an optimizer was made, and an exception of theirs ends the call.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch

from tightfit.errors.faults import note
from tightfit.torch_hooks.manifest import GRAPH_TASK_ID, MODULE_CALL, OPTIMIZER_INIT, Name
from tightfit.torch_hooks.replaced import Leave, Replaced


class CallOwner(Protocol):
    """Who is told of modules that are called, and not by another module. It is held weakly."""

    def before_outermost_call(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What a recomputation calls in a backward pass is a part of a model, and is not told."""
        ...


class OptimizerOwner(Protocol):
    """Who is told of optimizers that are made. It is held weakly."""

    def after_optimizer_was_made(self, optimizer: torch.optim.Optimizer) -> None:
        """The base class has been set up; the optimizer's own class may have more to do."""
        ...


class StepOwner(Protocol):
    """Who is told of the training steps of a framework's loop. It is held weakly."""

    def before_training_step(self, name: Name, owner: Any) -> None:
        """`owner` is the object whose method `name` it is."""
        ...


def on_outermost_call(owner: CallOwner) -> Leave:
    """Tells `owner` of outermost calls of modules until what is returned is called or it is collected.

    Raises:
        ApplyError: this torch has no such name.
    """
    return _CALL.enter(owner)


def on_new_optimizer(owner: OptimizerOwner) -> Leave:
    """Tells `owner` of optimizers that are made, likewise.

    Raises:
        ApplyError: this torch has no such name.
    """
    return _MADE.enter(owner)


def on_training_step(name: Name, owner: StepOwner) -> Leave:
    """Tells `owner` of the training steps of a framework, likewise.

    Raises:
        ApplyError: this version of the framework has no such name.
    """
    if name not in _STEPS:
        _STEPS[name] = Replaced(name, functools.partial(_put_step, name))
    return _STEPS[name].enter(owner)


class _Depth(threading.local):
    """How many calls of modules are under way in this thread: another one may evaluate meanwhile."""

    value = 0


_DEPTH = _Depth()
_graph_task: Callable[[], int] = GRAPH_TASK_ID.value()


def _put_call(inner: Callable[..., Any], owners: Callable[[], list[CallOwner]]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def __call__(module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:  # noqa: N807 - the name that it stands for
        if not _DEPTH.value and _graph_task() == -1:
            for owner in owners():
                _told(owner.before_outermost_call, module, args, kwargs)
        _DEPTH.value += 1
        try:
            return inner(module, *args, **kwargs)
        finally:
            _DEPTH.value -= 1

    return __call__


def _put_init(inner: Callable[..., Any], owners: Callable[[], list[OptimizerOwner]]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def __init__(optimizer: torch.optim.Optimizer, /, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        inner(optimizer, *args, **kwargs)
        for owner in owners():
            _told(owner.after_optimizer_was_made, optimizer)

    return __init__


def _put_step(name: Name, inner: Callable[..., Any], owners: Callable[[], list[StepOwner]]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def training_step(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        for owner in owners():
            _told(owner.before_training_step, name, self)
        return inner(self, *args, **kwargs)

    return training_step


def _told(tell: Callable[..., None], *args: Any) -> None:
    """Tells an owner. A fault of ours there is remembered, as the program may swallow it."""
    try:
        tell(*args)
    except Exception as error:
        note(error, "the run")
        raise


_CALL: Replaced[CallOwner] = Replaced(MODULE_CALL, _put_call)
_MADE: Replaced[OptimizerOwner] = Replaced(OPTIMIZER_INIT, _put_init)
_STEPS: dict[Name, Replaced[StepOwner]] = {}
