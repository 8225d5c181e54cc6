"""Writes to the data of a tensor (`tensor.data = other`) are looked at: torch asks the tensor that is written to, and not the other, for what to do.

A stand-in that has no memory would give the tensor an address of nothing, and the next operator that reads it would end the process.
"""

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch

from tightfit.torch_hooks.manifest import SET_ATTRIBUTE
from tightfit.torch_hooks.replaced import Leave, Replaced


class DataOwner(Protocol):
    """Is told before the data of a tensor is set."""

    def before_data(self, tensor: torch.Tensor, value: Any) -> None:
        """May raise, and the tensor is then left as it is."""


def on_data(owner: DataOwner) -> Leave:
    """Tells `owner` before each `tensor.data = value` as long as it is alive, or until the returned function is called.

    Raises:
        ApplyError: this torch has no such method.
    """
    return _REPLACED.enter(owner)


def _put(inner: Callable[..., None], owners: Callable[[], list[DataOwner]]) -> Callable[..., None]:
    @functools.wraps(inner)
    def set_attribute(tensor: torch.Tensor, name: str, value: Any, /) -> None:
        if name != "data" and torch.compiler.is_compiling():
            # The compiler takes a call of `inner` for one of this function, and looks into it again and again.
            object.__setattr__(tensor, name, value)
            return
        if name == "data":
            for owner in owners():
                owner.before_data(tensor, value)
        inner(tensor, name, value)

    return set_attribute


_REPLACED: Replaced[DataOwner] = Replaced(SET_ATTRIBUTE, _put)
