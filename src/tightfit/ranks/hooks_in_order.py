"""Hooks on weights that depend on which gradient comes first: the divided call hands all of them over at once, in an order of its own."""

from collections.abc import Iterable

import torch

from tightfit.techniques.wrappers.first_order import Refuse

# What `register_multi_grad_hook(mode="any")` puts on each of its tensors (torch/autograd/graph.py).
_OF_THE_FIRST = "wrapped_fn"


def refuse_first_of_several(tensors: Iterable[torch.Tensor], refuse: Refuse) -> None:
    """Raises where a hook is for the first gradient of several."""
    for tensor in tensors:
        for hook in (tensor._backward_hooks or {}).values():
            code = getattr(hook, "__code__", None)
            if code is not None and code.co_name == _OF_THE_FIRST and code.co_filename == torch.autograd.graph.__file__:
                raise refuse(
                    "a hook is called with the first gradient of several weights (register_multi_grad_hook with mode any), and which one comes first is not as on one card"
                )
