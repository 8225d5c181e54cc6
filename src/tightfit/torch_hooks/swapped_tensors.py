"""Exchanges of two tensors (`torch.utils.swap_tensors`) are looked at: torch exchanges none that is referred to weakly, and a program that catches its error
would go on with the tensors as they were."""

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch

from tightfit.torch_hooks.manifest import SWAP_TENSORS
from tightfit.torch_hooks.replaced import Leave, Replaced


class SwapOwner(Protocol):
    """Is told before two tensors are exchanged."""

    def before_swap(self, one: torch.Tensor, other: torch.Tensor) -> None:
        """May raise, and the tensors are then left as they are."""


def on_swap(owner: SwapOwner) -> Leave:
    """Tells `owner` before each exchange as long as it is alive, or until the returned function is called.

    Raises:
        ApplyError: this torch has no such function.
    """
    return _REPLACED.enter(owner)


def _put(inner: Callable[..., Any], owners: Callable[[], list[SwapOwner]]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def swap_tensors(t1: torch.Tensor, t2: torch.Tensor) -> Any:
        for owner in owners():
            owner.before_swap(t1, t2)
        return inner(t1, t2)

    return swap_tensors


_REPLACED: Replaced[SwapOwner] = Replaced(SWAP_TENSORS, _put)
