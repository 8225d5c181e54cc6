"""Who asks for the gradient of a tensor that is not computed: a hook on it or on the node that made it, `retain_grad`, `torch.autograd.grad`.

Asked before anything was made of the tensor, that computes it, and gradients go through it. Once a kernel has made its result from what the tensor
would come from, no gradient goes through the tensor any more: whoever asks then is refused, and is not given one of which a part is missing.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from tightfit.capture.steps.micro_batches import deferred_results
from tightfit.effects.reads import is_called_by_us
from tightfit.techniques.lazy_tensors.deferral import name_of
from tightfit.techniques.lazy_tensors.seen_as_tensor import SeenAsTensor
from tightfit.torch_hooks.backward import BackwardPass, on_backward
from tightfit.torch_hooks.tensor_hooks import on_tensor_hooks

if TYPE_CHECKING:
    from tightfit.techniques.session import Session

_ON_TENSORS = frozenset({"register_hook", "retain_grad"})


class DeferredTensor(torch.Tensor, metaclass=SeenAsTensor):
    """A tensor that is not computed, and is the result of a node of the graph."""

    def before_gradient(self) -> None:
        """Somebody is about to ask for the gradient with respect to this.

        Raises:
            ApplyError: no gradient goes through it.
        """
        raise NotImplementedError


deferred_results.KINDS.add(DeferredTensor)


def refuse_lost_gradients(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Does nothing where the call `func(*args, **kwargs)` asks for no gradient that is lost.

    Raises:
        ApplyError: it does.
    """
    for asked in tree_leaves(_asked_for(func, args, kwargs)):
        if isinstance(asked, DeferredTensor):
            asked.before_gradient()


def is_read_of_node(func: Callable[..., Any]) -> bool:
    """Whether the program reads the node that made a tensor, on which it may put hooks: it is to be the node that the result comes from."""
    if name_of(func) != "grad_fn":
        return False
    frame = sys._getframe(1)
    while frame.f_code.co_name != "__torch_function__" and frame.f_back is not None:
        frame = frame.f_back
    return not is_called_by_us(frame)


def watch_inputs_of_backward(session: "Session") -> None:
    """Has backward passes looked at, for the time of the session, that are asked by name for the gradients of tensors or of edges of the graph.

    `before_gradient`, which the forward of an autograd function of ours has left on its node, is called before that, and before a hook is put
    on its result.
    """
    inputs = _Inputs()
    leaves = on_backward(inputs), on_tensor_hooks(inputs)

    def end(_: object = inputs) -> None:  # which keeps it
        for leave in leaves:
            leave()

    session.when_undone(end)


class _Inputs:
    def concerned_parameters(self) -> None:
        """As `tightfit.torch_hooks.backward.BackwardOwner`: the pass may lead to no leaf."""

    def around_backward(self, backward: BackwardPass) -> Any:
        """As `tightfit.torch_hooks.backward.BackwardOwner`."""
        for check in _checks(backward.inputs):
            check()
        return backward.run()


def _asked_for(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if func is torch.autograd.grad:
        return args[1] if len(args) > 1 else kwargs["inputs"]
    if func is torch.autograd.backward:
        return kwargs.get("inputs")
    return args[0] if args and (name_of(func) in _ON_TENSORS or is_read_of_node(func)) else None


def _checks(inputs: Sequence[Any]) -> Iterator[Callable[[], None]]:
    for given in inputs:
        if isinstance(given, DeferredTensor):
            yield given.before_gradient
        else:
            node = given.grad_fn if isinstance(given, torch.Tensor) else given.node
            yield getattr(node, "before_gradient", lambda: None)
