"""Gradients of parameters that are given other data: torch keeps them, and graphs that were made before add to them.

On the virtual GPU a parameter is given other contents instead, and graphs know the former ones: what arrives there is handed on. A gradient on another
device than the data, which torch has and takes from nobody, is kept beside the parameter until both are on one device again.
"""

import weakref
from typing import Any

import torch

from tightfit.capture.patches.manifest import SET_VERSIONS

_ELSEWHERE = "tightfit_gradient_elsewhere"


def elsewhere(parameter: torch.Tensor) -> torch.Tensor | None:
    """The gradient that `parameter` has on another device, on the virtual GPU alone."""
    return vars(parameter).get(_ELSEWHERE)


def keep(target: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """`target` has other contents now, and had this gradient before."""
    gradient = vars(target).pop(_ELSEWHERE, None) if gradient is None else gradient
    if gradient is None or (gradient.shape, gradient.dtype) != (target.shape, target.dtype):
        return
    if gradient.device == target.device:
        target.grad = gradient
        vars(target).pop(_ELSEWHERE, None)
    else:
        vars(target)[_ELSEWHERE] = gradient


def replace(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """The gradient that `parameter` has, wherever, is `gradient` now."""
    vars(parameter).pop(_ELSEWHERE, None)
    parameter.grad = None
    keep(parameter, gradient)


def hand_on(former: Any, target: torch.Tensor) -> None:
    """What graphs add to the gradient of the `former` contents of `target` from now on is the gradient of `target`."""
    known = weakref.ref(target)

    def hand(tensor: torch.Tensor) -> None:
        live, gradient = known(), tensor.grad
        if live is None or gradient is None or gradient.device != live.device:
            return
        tensor.grad = None
        if live.grad is None:
            live.grad = gradient
        else:
            live.grad.add_(gradient)

    former.register_post_accumulate_grad_hook(hand)
    if not former.is_cuda or not former.numel():
        return
    # A graph that refers to the parameter refers to its present memory, and not to the former. That writes to nothing that a graph has saved.
    version = former._version
    with torch.no_grad():
        nothing = torch.empty(1, dtype=former.dtype, device=former.device)
        former.set_(nothing.expand(former.shape))
    SET_VERSIONS.value()((former,), (version,))
