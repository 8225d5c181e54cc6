"""Lets owners make the copies of tensors that a program asks for (`tensor.to`, `tensor.cuda`), and tells them of its other ones (`tensor.copy_`).

What code of this package copies is torch's: its own order of copies is by events, and no program counts on it.
"""

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import FrameType
from typing import Any, Protocol

import torch

from tightfit.torch_hooks.manifest import TENSOR_COPY, TENSOR_CUDA, TENSOR_TO
from tightfit.torch_hooks.replaced import Leave, Replaced


class TensorMoveOwner(Protocol):
    """Is asked before tensors are moved. It is held weakly."""

    def moved(self, tensor: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
        """The result of `tensor.to(*args, **kwargs)`; None where torch is to make it. `tensor.cuda` is asked with its device as the first argument."""
        ...

    def copies(self, target: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Called before `target.copy_(*args, **kwargs)`."""
        ...


def on_tensor_moves(owner: TensorMoveOwner) -> Leave:
    """Asks `owner` until the returned function is called or the owner is collected.

    Raises:
        ApplyError: this torch has no such name.
    """
    with ExitStack() as leaves:
        for replaced in (_TO, _CUDA, _COPY):
            leaves.callback(replaced.enter(owner))
        return leaves.pop_all().close


def _put_to(inner: Callable[..., Any], owners: Callable[[], list[TensorMoveOwner]]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        for owner in owners() if _is_of_program(sys._getframe(1)) else ():
            moved = owner.moved(self, args, kwargs)
            if moved is not None:
                return moved
        return inner(self, *args, **kwargs)

    return to


def _put_cuda(inner: Callable[..., Any], owners: Callable[[], list[TensorMoveOwner]]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        for owner in owners() if _is_of_program(sys._getframe(1)) else ():
            moved = _of_cuda(owner, self, args, kwargs)
            if moved is not None:
                return moved
        return inner(self, *args, **kwargs)

    return cuda


def _of_cuda(
    owner: TensorMoveOwner, tensor: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> torch.Tensor | None:
    """As of `tensor.to`: torch has (device=None, non_blocking=False, memory_format)."""
    others = dict(kwargs)
    device = args[0] if args else others.pop("device", None)
    if len(args) > 1:
        others["non_blocking"] = args[1]
    return None if len(args) > 2 else owner.moved(tensor, ("cuda" if device is None else device,), others)


def _put_copy(inner: Callable[..., Any], owners: Callable[[], list[TensorMoveOwner]]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def copy_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        for owner in owners() if _is_of_program(sys._getframe(1)) else ():
            owner.copies(self, args, kwargs)
        return inner(self, *args, **kwargs)

    return copy_


def _is_of_program(caller: FrameType) -> bool:
    return not str(caller.f_globals.get("__name__")).startswith(_OURS)


_OURS = f"{__name__.partition('.')[0]}."
_TO: Replaced[TensorMoveOwner] = Replaced(TENSOR_TO, _put_to)
_CUDA: Replaced[TensorMoveOwner] = Replaced(TENSOR_CUDA, _put_cuda)
_COPY: Replaced[TensorMoveOwner] = Replaced(TENSOR_COPY, _put_copy)
