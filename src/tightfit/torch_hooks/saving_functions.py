"""Which `torch.autograd.Function` of the program's is having its tensors saved, where a hook for saved tensors is called.

`Function.apply` is C code from torch 2.14 on, with no frame on the stack. Each forward names what it saves by `ctx.save_for_backward`, which is Python
code; once the forward has returned, its tensors are saved one after the other, which `ctx._raw_saved_tensors` counts. Without owners nothing is noted.

From torch 2.10 on a context forgets what was named (`to_save`) before it is saved, and up to 2.9 after that: there the frame that had the hook called tells
a forward that still runs from one that is over (`_save_variables` in torch/csrc/autograd/python_function.cpp).
"""

import functools
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from tightfit.torch_hooks.manifest import SAVE_FOR_BACKWARD
from tightfit.torch_hooks.replaced import Leave, Replaced

# None where it is C code.
_APPLY = getattr(getattr(torch.autograd.Function.apply, "__func__", None), "__code__", None)


class _Thread(threading.local):
    """What the forwards that run in this thread have named so far, the innermost last: the context of each, and how many tensors."""

    def __init__(self) -> None:
        self.named: list[tuple[weakref.ref[Any], int]] = []


_thread = _Thread()


def on_saving_functions(owner: object) -> Leave:
    """Has `saving_function` answer as long as `owner` is alive, or until the returned function is called.

    Raises:
        ApplyError: this torch has no such method.
    """
    return _REPLACED.enter(owner)


def saving_function() -> Any:
    """The class of the function whose tensors are being saved: to be asked within a hook for saved tensors. None if it is an operator that saves."""
    while _thread.named:
        reference, num_named = _thread.named[-1]
        context = reference()
        if context is not None and context.to_save is not None and not _is_hook_of_apply():
            # Its forward still runs: what is saved now is of an operator inside.
            return None
        num_saved = num_named if context is None else _num_saved(context)
        if num_saved is not None and num_saved < num_named:
            return type(context)._forward_cls  # pyrefly: ignore[missing-attribute]
        _thread.named.pop()
    return None


def _is_hook_of_apply() -> bool:
    """Whether the hook was called within `Function.apply` with no other Python code between: its forward has returned."""
    if _APPLY is None:
        return False
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith("tightfit."):
        frame = frame.f_back
    return frame is not None and frame.f_code is _APPLY


def _num_saved(context: Any) -> int | None:
    try:
        return len(context._raw_saved_tensors)
    # Its backward pass is over, and has freed them.
    except RuntimeError:
        return None


def _put(inner: Callable[..., Any], owners: Callable[[], list[object]]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def save_for_backward(context: Any, *tensors: Any) -> Any:
        if owners():
            named = _thread.named
            # A forward may name them again, and one that had nothing to save is gone.
            named[:] = [each for each in named if each[0]() not in (None, context)]
            named.append((weakref.ref(context), len(tensors)))
        return inner(context, *tensors)

    return save_for_backward


_REPLACED: Replaced[object] = Replaced(SAVE_FOR_BACKWARD, _put)
