"""For our autograd functions whose backward is not differentiable: they refuse a second derivative instead of omitting its terms.

`torch.autograd.function.once_differentiable` raises only if the incoming gradient requires a gradient itself; a gradient penalty, whose does not,
would silently lose its second-order part.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from tightfit.effects.ambient import names_of_modes
from tightfit.errors import ApplyError
from tightfit.torch_hooks.saved_tensor_hooks import packs_by_itself

Refuse = Callable[[str], ApplyError]
"""Makes the error to raise from what is wrong: `Session.refuse` with what it is about, or `ApplyError` itself."""


def first_order(
    what: str, advice: str = "", *, has_derivative: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates the `backward(ctx, *gradients)` of an autograd function of the technique `what`, whose `ctx.refuse` is a `Refuse`. `advice` is what
    to do, where that does not say it. With `has_derivative` it is made of operators that are differentiable, where gradients are on.

    Raises:
        ApplyError: (the result) it is run with `create_graph`, for many gradients at once, or inside of a dispatch mode of the program's.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def once(ctx: Any, *gradients: Any) -> Any:
            # The engine runs backward functions with gradients on exactly if create_graph is set.
            if torch.is_grad_enabled() and not has_derivative:
                raise ctx.refuse(
                    f"the program differentiates through a backward pass (create_graph=True), and {what} has no "
                    f"double backward{advice}"
                )
            if any(map(_are_many, gradients)):
                raise ctx.refuse(
                    f"the program runs a batched backward pass (is_grads_batched, vmap), which {what} does not "
                    f"support{advice}"
                )
            if modes := names_of_modes():
                raise ctx.refuse(
                    f"the backward pass runs under {modes[0]}, a mode that sees every operator, and {what} runs "
                    f"different ones{advice}"
                )
            if packs_by_itself():
                raise ctx.refuse(
                    f"the backward pass runs under saved-tensor hooks, and {what} saves different tensors{advice}"
                )
            return backward(ctx, *gradients)

        return once

    return decorate


def _are_many(gradient: Any) -> bool:
    """Whether this is a batch of gradients, for which operators run once."""
    is_tensor = isinstance(gradient, torch.Tensor)
    return is_tensor and (
        torch._C._functorch.is_batchedtensor(gradient) or torch._C._functorch.is_legacy_batchedtensor(gradient)
    )


def check_transforms(what: str, refuse: Refuse) -> None:
    """Checks that plain reverse-mode autograd differentiates a call.

    Raises:
        ApplyError: it runs inside of a transform of torch.func (grad, vmap, jvp), or of forward-mode differentiation.
    """
    if are_transforms_active():
        raise refuse(
            f"the program applies torch.func or forward-mode differentiation to the model, which {what} does not "
            "support"
        )


def are_transforms_active() -> bool:
    """Whether a transform of torch.func or forward-mode differentiation is active."""
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0
