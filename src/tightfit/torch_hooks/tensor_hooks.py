"""Which non-leaf tensors have hooks or retain their gradient: `Tensor.register_hook` and `Tensor.retain_grad` mark the tensor's node.

A graph does not list its hooks, and a backward pass that is run again would call them again. Nothing is marked while there is no owner.
"""

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from tightfit.torch_hooks.manifest import RETAIN_GRAD, TENSOR_HOOK
from tightfit.torch_hooks.replaced import Leave, Replaced

_NOTE = "tightfit: hooked"

# Reading a node's metadata allocates it, so it is not read before the first mark.
_noted: list[bool] = []


def on_tensor_hooks(owner: object) -> Leave:
    """Marks nodes whose tensors get hooks as long as `owner` is alive, or until the returned function is called.

    Raises:
        ApplyError: this torch has no such methods.
    """
    with ExitStack() as leaves:
        for replaced in _REPLACED:
            leaves.callback(replaced.enter(owner))
        return leaves.pop_all().close


def is_hooked(node: Any) -> bool:
    """Whether the result of this autograd node has had a hook registered."""
    return bool(_noted) and _NOTE in node.metadata


def _put(inner: Callable[..., Any], owners: Callable[[], list[object]]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def hooked(tensor: Any, /, *args: Any, **kwargs: Any) -> Any:
        if owners() and tensor.grad_fn is not None:
            # A node of ours may know that gradients go past it.
            getattr(tensor.grad_fn, "before_gradient", _nothing)()
            # On the node and not in a table by tensor: in-place operators give a tensor another node, and hooks
            # stay with the one that they were registered on. `metadata` is the anomaly mode's dict
            # (torch/csrc/autograd/python_anomaly_mode.h).
            tensor.grad_fn.metadata[_NOTE] = True
            _noted[:] = [True]
        return inner(tensor, *args, **kwargs)

    return hooked


def _nothing() -> None:
    pass


_REPLACED: tuple[Replaced[object], ...] = (Replaced(TENSOR_HOOK, _put), Replaced(RETAIN_GRAD, _put))
