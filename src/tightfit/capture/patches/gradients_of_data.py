"""Gradients of parameters that are given other data: torch keeps them, and graphs that were made before add to them.

On the virtual GPU a parameter is given other contents instead, and graphs know the former ones: what arrives there is handed on. A gradient of another shape
or type than the data, or on another device, which torch has and takes from nobody, is kept beside the parameter until they are alike again.
"""

import weakref
from typing import Any

import torch

from tightfit.capture.patches.manifest import SET_VERSIONS
from tightfit.capture.replace import replace as replace_names

_ELSEWHERE = "tightfit_gradient_elsewhere"


def elsewhere(parameter: torch.Tensor) -> torch.Tensor | None:
    """The gradient that `parameter` has and that is not like it, on the virtual GPU alone."""
    return vars(parameter).get(_ELSEWHERE)


def keep(target: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """`target` has other contents now, and had this gradient before."""
    gradient = vars(target).pop(_ELSEWHERE, None) if gradient is None else gradient
    if gradient is None:
        return
    if (gradient.shape, gradient.dtype, gradient.device) == (target.shape, target.dtype, target.device):
        target.grad = gradient
        vars(target).pop(_ELSEWHERE, None)
    else:
        vars(target)[_ELSEWHERE] = gradient


def show_those_unlike() -> None:
    """Has `.grad` be a gradient that is not like its tensor too: fully sharded parameters are given their shard as data while they have the gradient of the whole."""
    # It lists the getter by its name, when it is first asked.
    torch.overrides.get_default_nowrap_functions()
    grad: Any = torch.Tensor.grad

    def get(self: torch.Tensor) -> torch.Tensor | None:
        found = grad.__get__(self)
        return self.__dict__.get(_ELSEWHERE) if found is None else found

    def set_(self: torch.Tensor, value: torch.Tensor | None) -> None:
        self.__dict__.pop(_ELSEWHERE, None)
        grad.__set__(self, value)

    def delete(self: torch.Tensor) -> None:
        set_(self, None)

    replace_names(torch.Tensor, grad=property(get, set_, delete))


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
