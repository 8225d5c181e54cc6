"""Which function of torch has called a `__torch_function__`.

A function of torch that is written in Python passes what its own name stands for (torch/nn/functional.py, `handle_torch_function(cross_entropy, ...)`).
Where the program has put its own function there, which calls torch's, that is the program's: calling it would run its code a second time.
"""

import os
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import handle_torch_function

from tightfit.errors import ApplyError

OF_C = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.ClassMethodDescriptorType,
)
"""What functions of C are, which nobody has written in Python."""
_TORCH = os.path.dirname(torch.__file__) + os.sep
# By their code, for a program that replaces one of them later.
_WRITTEN_IN_PYTHON: dict[types.CodeType, Callable[..., Any]] = {
    value.__code__: value
    for owner in (functional, torch.functional, torch.Tensor)
    for value in vars(owner).values()
    if isinstance(value, types.FunctionType)
}
# Functions of torch that do not hand an argument on to a `__torch_function__` (torch/nn/functional.py).
_FORGETS = {functional.l1_loss.__code__: "weight"}


def dispatched(func: Callable[..., Any]) -> Callable[..., Any]:
    """What a `__torch_function__`, the caller of this, is to call in place of the `func` that it was given: torch's own function.

    Raises:
        ApplyError: the program has replaced the function, and torch's own is not known; or torch has dropped an argument.
    """
    if isinstance(func, OF_C):
        return func
    code = getattr(func, "__code__", None)
    passed_on = sys._getframe(1).f_back
    if passed_on is None or passed_on.f_code is not handle_torch_function.__code__ or passed_on.f_back is None:
        return func
    asks = passed_on.f_back.f_code
    forgotten = _FORGETS.get(asks)
    if forgotten is not None and passed_on.f_back.f_locals.get(forgotten) is not None:
        raise ApplyError(
            f"torch ignores the {forgotten} of {asks.co_name} where it calls __torch_function__, as here: "
            f"call it with reduction='none', and multiply by the {forgotten}"
        )
    # A function of the program's own that asks for itself, and torch's functions, some of which ask for one another.
    if (
        asks is code
        or not asks.co_filename.startswith(_TORCH)
        or (code is not None and code.co_filename.startswith(_TORCH))
    ):
        return func
    found = _WRITTEN_IN_PYTHON.get(asks)
    if found is None:
        raise ApplyError(
            f"the program has replaced torch's {asks.co_name} before tightfit was imported; replace it after that"
        )
    return found
