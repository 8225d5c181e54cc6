"""Notifies owners of outermost module calls, of new optimizers and wrappers, of the training steps of a framework's loop, and of calls of transformers' `generate`.

What is called is not changed: owners are notified before a call, or after an optimizer or a wrapper was constructed, and an exception of theirs ends the call.
The owner of a training step or of a call of `generate` may make the call itself, and more than once.
"""

import functools
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol

import torch

from tightfit.errors.faults import note
from tightfit.torch_hooks.manifest import (
    GENERATE,
    GRAPH_TASK_ID,
    MODULE_CALL,
    OPTIMIZER_INIT,
    PREPARE_CACHE,
    REDUCER_INIT,
    Name,
)
from tightfit.torch_hooks.replaced import Leave, Replaced


class CallOwner(Protocol):
    """Is notified of outermost module calls: those that no other module makes. It is held weakly."""

    def before_outermost_call(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called before the call. Calls inside a backward pass are recomputations of a part of a model, and are left out."""
        ...


class OptimizerOwner(Protocol):
    """Is notified of new optimizers. It is held weakly."""

    def after_optimizer_was_made(self, optimizer: torch.optim.Optimizer) -> None:
        """The base class has been set up; the optimizer's own class may have more to do."""
        ...


class ReducerOwner(Protocol):
    """Is notified of new wrappers of DistributedDataParallel. It is held weakly."""

    def after_reducer_was_made(self, wrapper: torch.nn.Module) -> None:
        """Gradients of the module inside are averaged from now on."""
        ...


class StepOwner:
    """Is notified of the training steps of a framework's loop. It is held weakly."""

    def before_training_step(self, name: Name, owner: Any) -> None:
        """`owner` is the object whose method `name` it is."""

    def around_training_step(self, owner: Any, call: Callable[[], Any], arguments: tuple[Any, ...]) -> Any:
        """The step's result, which `call` returns: all owners' are made one around the other. `arguments` are those of the method, `owner` aside."""
        return call()


class GenerationOwner(Protocol):
    """Has a say in what `generate` does. It is held weakly."""

    def around_generate(
        self, model: Any, generate: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The result of the call, which `generate(model, *args, **kwargs)` makes."""
        ...

    def before_cache(self, model: Any, generation_config: Any, model_kwargs: dict[str, Any]) -> None:
        """Called before a cache is made by `generation_config`, a copy that is the call's own; a cache of the program's is in `model_kwargs`."""
        ...


def on_outermost_call(owner: CallOwner) -> Leave:
    """Notifies `owner` of outermost module calls until the returned function is called or the owner is collected.

    Raises:
        ApplyError: this torch has no such name.
    """
    return _CALL.enter(owner)


def on_new_optimizer(owner: OptimizerOwner) -> Leave:
    """Notifies `owner` of new optimizers, likewise.

    Raises:
        ApplyError: this torch has no such name.
    """
    return _MADE.enter(owner)


def on_new_reducer(owner: ReducerOwner) -> Leave:
    """Notifies `owner` of new wrappers of DistributedDataParallel, likewise.

    Raises:
        ApplyError: this torch has no such name.
    """
    return _REDUCED.enter(owner)


def on_training_step(name: Name, owner: StepOwner) -> Leave:
    """Notifies `owner` of the training steps of a framework, likewise.

    Raises:
        ApplyError: this version of the framework has no such name.
    """
    if name not in _STEPS:
        _STEPS[name] = Replaced(name, functools.partial(_put_step, name))
    return _STEPS[name].enter(owner)


def on_generation(owner: GenerationOwner) -> Leave:
    """Notifies `owner` until the returned function is called, or it is collected.

    Raises:
        ApplyError: this version of transformers has no such names.
    """
    with ExitStack() as leaves:
        leaves.callback(_CACHE.enter(owner))
        leaves.callback(_GENERATE.enter(owner))
        return leaves.pop_all().close


class _Depth(threading.local):
    """How many module calls are under way in this thread; another thread may evaluate meanwhile."""

    value = 0


_DEPTH = _Depth()
_graph_task: Callable[[], int] = GRAPH_TASK_ID.value()


def _put_call(inner: Callable[..., Any], owners: Callable[[], list[CallOwner]]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def __call__(module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:  # noqa: N807 - the name that it stands for
        # Depth alone is not enough: a checkpointed block is called again by the engine, often on autograd's own
        # thread, where no module call is under way.
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
        # Owners are notified afterwards: it is the base class's `__init__` that fills `param_groups`.
        inner(optimizer, *args, **kwargs)
        for owner in owners():
            _told(owner.after_optimizer_was_made, optimizer)

    return __init__


def _put_reducer(inner: Callable[..., Any], owners: Callable[[], list[ReducerOwner]]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def __init__(wrapper: torch.nn.Module, /, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        inner(wrapper, *args, **kwargs)
        for owner in owners():
            _told(owner.after_reducer_was_made, wrapper)

    return __init__


def _put_generate(inner: Callable[..., Any], owners: Callable[[], list[GenerationOwner]]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def generate(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        found = owners()
        return found[-1].around_generate(self, inner, args, kwargs) if found else inner(self, *args, **kwargs)

    return generate


def _put_cache(inner: Callable[..., Any], owners: Callable[[], list[GenerationOwner]]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def prepare(self: Any, generation_config: Any, model_kwargs: Any, /, *args: Any, **kwargs: Any) -> Any:
        for owner in owners():
            owner.before_cache(self, generation_config, model_kwargs)
        return inner(self, generation_config, model_kwargs, *args, **kwargs)

    return prepare


def _put_step(name: Name, inner: Callable[..., Any], owners: Callable[[], list[StepOwner]]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def training_step(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        found = owners()
        for owner in found:
            _told(owner.before_training_step, name, self)
        call = functools.partial(inner, self, *args, **kwargs)
        for owner in found:
            call = functools.partial(owner.around_training_step, self, call, (*args, *kwargs.values()))
        return call()

    return training_step


def _told(tell: Callable[..., None], *args: Any) -> None:
    """Notifies an owner. An error of ours is noted first, as the program may swallow it."""
    try:
        tell(*args)
    except Exception as error:
        note(error, "the run")
        raise


_CALL: Replaced[CallOwner] = Replaced(MODULE_CALL, _put_call)
_MADE: Replaced[OptimizerOwner] = Replaced(OPTIMIZER_INIT, _put_init)
_REDUCED: Replaced[ReducerOwner] = Replaced(REDUCER_INIT, _put_reducer)
_STEPS: dict[Name, Replaced[StepOwner]] = {}
_GENERATE: Replaced[GenerationOwner] = Replaced(GENERATE, _put_generate)
_CACHE: Replaced[GenerationOwner] = Replaced(PREPARE_CACHE, _put_cache)
