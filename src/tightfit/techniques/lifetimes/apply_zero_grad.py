"""Puts `zero_grad` on live objects: see `tightfit.techniques.lifetimes.zero_grad` for what it is and where it comes from."""

import functools
import weakref
from collections.abc import Container, Iterable, Sequence
from typing import Any

import torch

from tightfit.effects.users_code import is_users_function
from tightfit.errors import ApplyError
from tightfit.techniques.lazy_tensors.deferred_gradients import (
    add_to_zeros,
    defer_gradient,
    deferred_gradient,
    deferred_zeros,
    is_held,
    settle,
    settle_held_zeros,
    settle_zeros,
)
from tightfit.techniques.lazy_tensors.lazy_tensor import LazyTensor
from tightfit.techniques.lazy_tensors.retained_graphs import told_of_gradients
from tightfit.techniques.optimizer.updates.optimizer_steps import update_within_step
from tightfit.techniques.session import Session
from tightfit.techniques.technique import ChosenOption
from tightfit.torch_hooks.backward import BackwardPass, on_backward
from tightfit.torch_hooks.manifest import STORAGE_USES
from tightfit.torch_hooks.node_hooks import is_any_node_hooked, on_node_hooks
from tightfit.torch_hooks.tensor_hooks import is_hooked, on_tensor_hooks

# Uses of the storage of a gradient that only its parameter keeps: the gradient and a name.
_OWN_USES = 2
# What `register_full_backward_hook` puts into the graph (torch/nn/modules/_functions.py).
_HOOK_OF_MODULES = "BackwardHookFunctionBackward"


def apply_zero_grad(session: Session, chosen: Sequence[ChosenOption]) -> None:
    """Replaces `zero_grad` of the model and of every optimizer.

    Raises:
        ApplyError: one of them has a `zero_grad` of its own.
    """
    for owner, base in [(session.model, torch.nn.Module), *((o, torch.optim.Optimizer) for o in session.optimizers)]:
        # What it does besides would be left out.
        if "zero_grad" in vars(owner) or type(owner).zero_grad is not base.zero_grad or not _is_torchs(owner):
            raise ApplyError(f"{type(owner).__name__} overrides zero_grad; leave zero_grad out of the plan")
    freed = _Freed()
    for optimizer in session.optimizers:
        # On the object and weakly, so that the optimizer does not become part of a reference cycle and is
        # freed when the program drops it.
        session.set(optimizer, "zero_grad", functools.partial(_zero_optimizer, weakref.ref(optimizer), freed))
        # Whatever the script did not call `zero_grad` for is there when torch's loop comes.
        update_within_step(session, optimizer, functools.partial(_settle, weakref.ref(optimizer)))
    session.set(session.model, "zero_grad", functools.partial(_zero_module, weakref.ref(session.model), freed))
    leaves = on_backward(freed), on_tensor_hooks(freed), on_node_hooks(freed)

    def end() -> None:
        for leave in leaves:
            leave()
        freed.end()

    session.when_undone(end)


class _Freed:
    """The parameters whose gradients were freed instead of filled with zeros, and have lazy gradients of zeros."""

    def __init__(self) -> None:
        self._zeroed: dict[torch.Tensor, None] = {}

    def zero(self, parameters: Iterable[torch.Tensor]) -> None:
        """Replaces the gradients of these parameters by lazy zeros."""
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            deferred = deferred_gradient(parameter)
            if deferred is not None or is_held(parameter) or not _is_made_anew(parameter):
                # A lazy gradient handles `zero_` itself; a view of the script's own buffer is filled in place.
                with torch.no_grad():
                    gradient.detach_() if gradient.grad_fn is not None else gradient.requires_grad_(False)
                    gradient.zero_()
                continue
            defer_gradient(parameter, deferred_zeros(gradient))
            self._zeroed[parameter] = None

    def concerned_parameters(self) -> Container[torch.Tensor]:
        """As `tightfit.torch_hooks.backward.BackwardOwner`."""
        return self._zeroed

    def around_backward(self, backward: BackwardPass) -> Any:
        """New gradients replace the zeros; a parameter that gets none keeps its zeros."""
        if not backward.accumulates:
            return backward.run()
        standing = {}
        for parameter in backward.leaves():
            settle_held_zeros(parameter)
            deferred = deferred_gradient(parameter) if parameter in self._zeroed else None
            if deferred is not None and deferred.state == "zero":
                standing[parameter] = parameter.grad
        if standing and _may_be_looked_at(backward):
            for parameter in standing:
                settle_zeros(parameter)
            return backward.run()
        for parameter in standing:
            parameter.grad = None
        try:
            # A gradient with a graph must not be changed in place: it stays as the engine made it.
            with told_of_gradients(() if backward.creates_graph else standing, add_to_zeros):
                return backward.run()
        finally:
            for parameter, zeros in standing.items():
                if parameter.grad is None:
                    parameter.grad = zeros
                elif deferred_gradient(parameter) is None:
                    # Until it is freed again: the program may drop the parameter before that.
                    self._zeroed.pop(parameter, None)

    def end(self) -> None:
        """Materialises the zeros."""
        for parameter in self._zeroed:
            settle_zeros(parameter)
        self._zeroed.clear()

    def before_node_hook(self, hook: object) -> None:
        """Does nothing: `is_any_node_hooked` is asked when a backward pass begins."""


def _may_be_looked_at(backward: BackwardPass) -> bool:
    """Whether a pass calls hooks of the program's, to which a gradient that is gone is not one of zeros."""
    return (
        is_any_node_hooked()
        or any(leaf._backward_hooks or leaf._post_accumulate_grad_hooks for leaf in backward.leaves())
        or any(is_hooked(node) or type(node).__name__ == _HOOK_OF_MODULES for node in backward.nodes())
    )


def _is_made_anew(parameter: torch.Tensor) -> bool:
    """Whether a backward pass makes a gradient like the one that there is, to the memory of which nothing else may refer: it is no view and has none."""
    gradient: Any = parameter.grad
    if gradient.layout != torch.strided or isinstance(gradient, LazyTensor) or gradient._is_view():
        return False
    sizes = zip(parameter.shape, parameter.stride(), gradient.stride(), strict=True)
    if gradient.dtype != parameter.dtype or any(one != other for size, one, other in sizes if size > 1):
        return False
    storage = gradient.untyped_storage()
    # What the program has noted on it stays. (Those of the virtual GPU have attributes of torch's.)
    is_noted = type(gradient) is torch.Tensor and bool(vars(gradient))
    return not is_noted and STORAGE_USES.call(storage._cdata) <= _OWN_USES


def _settle(known: "weakref.ref[torch.optim.Optimizer]") -> tuple[()]:
    """Materialises, within a step, zeros that no backward pass has replaced."""
    optimizer = known()
    for group in optimizer.param_groups if optimizer is not None else ():
        for parameter in group["params"]:
            deferred = deferred_gradient(parameter)
            if deferred is not None and deferred.state == "zero":
                deferred.whole()
            settle(parameter)
    return ()


def _is_torchs(owner: Any) -> bool:
    return not is_users_function(type(owner).zero_grad)


def _zero_optimizer(known: "weakref.ref[torch.optim.Optimizer]", freed: _Freed, set_to_none: bool = True) -> None:
    """Replaces `Optimizer.zero_grad`."""
    optimizer = known()
    assert optimizer is not None
    if set_to_none:
        type(optimizer).zero_grad(optimizer)
    elif not _is_torchs(optimizer):
        # The program has put another one into its class since.
        type(optimizer).zero_grad(optimizer, set_to_none=False)
    else:
        freed.zero(p for group in optimizer.param_groups for p in group["params"])


def _zero_module(known: "weakref.ref[torch.nn.Module]", freed: _Freed, set_to_none: bool = True) -> None:
    """Replaces `Module.zero_grad`."""
    module = known()
    assert module is not None
    if set_to_none:
        type(module).zero_grad(module)
    elif not _is_torchs(module):
        type(module).zero_grad(module, set_to_none=False)
    else:
        freed.zero(module.parameters())
