"""Makes waiting gradients before the program casts a weight in place (`model.half()`), which torch does through `parameter.data`, and the graph would see; and
before it exchanges one for another tensor, which torch does with none that a graph has saved.
"""

from collections.abc import Callable
from typing import Any

import torch

from tightfit.torch_hooks.replaced import Leave
from tightfit.torch_hooks.swapped_tensors import on_swap
from tightfit.torch_hooks.tensor_data import on_data


def make_before_casts_and_swaps(make_all: Callable[[], None]) -> Leave:
    """Calls `make_all` before the data of a leaf becomes another type's, and before tensors are exchanged, until the returned function is called."""
    owner = _Casts(make_all)
    leaves = on_data(owner), on_swap(owner)

    def end(_: object = owner) -> None:  # which keeps it
        for leave in leaves:
            leave()

    return end


class _Casts:
    def __init__(self, make_all: Callable[[], None]) -> None:
        self._make_all = make_all

    def before_data(self, tensor: torch.Tensor, value: Any) -> None:
        """As `tightfit.torch_hooks.tensor_data.DataOwner`. A gradient is cast after its weight, when a second backward pass would multiply with the cast one."""
        if isinstance(value, torch.Tensor) and value.dtype != tensor.dtype and tensor.is_leaf:
            self._make_all()

    def before_swap(self, one: torch.Tensor, other: torch.Tensor) -> None:
        """As `tightfit.torch_hooks.swapped_tensors.SwapOwner`."""
        self._make_all()
