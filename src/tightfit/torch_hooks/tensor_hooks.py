"""Which tensors inside a graph somebody has hooked, or wants the gradient of: `Tensor.register_hook` and `Tensor.retain_grad` note it on the node.

A graph does not tell its hooks, and a backward pass that is run again would call them again. Nothing is noted while there is no owner.
"""

import functools
from collections.abc import Callable
from typing import Any

from tightfit.torch_hooks.manifest import RETAIN_GRAD, TENSOR_HOOK
from tightfit.torch_hooks.replaced import Leave, Replaced

_NOTE = "tightfit: hooked"

# Reading what is noted on a node makes room for notes on it: not done before there was a first one.
_noted: list[bool] = []


def on_tensor_hooks(owner: object) -> Leave:
    """Has hooks on tensors inside of graphs noted for as long as `owner` lives, or until what is returned is called.

    Raises:
        ApplyError: this torch has no such methods.
    """
    leaves = [replaced.enter(owner) for replaced in _REPLACED]

    def leave() -> None:
        for each in leaves:
            each()

    return leave


def is_hooked(node: Any) -> bool:
    """Whether the result of this node of a graph was hooked."""
    return bool(_noted) and _NOTE in node.metadata


def _put(inner: Callable[..., Any], owners: Callable[[], list[object]]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def hooked(tensor: Any, /, *args: Any, **kwargs: Any) -> Any:
        if owners() and tensor.grad_fn is not None:
            # A node of ours may know that gradients go past it.
            getattr(tensor.grad_fn, "before_gradient", _nothing)()
            tensor.grad_fn.metadata[_NOTE] = True
            _noted[:] = [True]
        return inner(tensor, *args, **kwargs)

    return hooked


def _nothing() -> None:
    pass


_REPLACED: tuple[Replaced[object], ...] = (Replaced(TENSOR_HOOK, _put), Replaced(RETAIN_GRAD, _put))
