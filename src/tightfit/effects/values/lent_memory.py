"""Memory at the host that code has by another name than a tensor's: an array of numpy's or a buffer that the tensor was made of, or that was made of it. What is written there by that
name is seen by no operator, and by no version.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from tightfit.effects.values.contents import content_of, unwrapped

_LARGEST_BYTES = 1 << 12
"""Of tensors that are looked at whenever they are read: numbers and tables, and not data."""
# Torch does not tell of the last one that it has handed the memory out.
_BY_DLPACK = torch.Tensor.__dlpack__
HANDS_OUT: frozenset[Callable[..., Any]] = frozenset({torch.Tensor.numpy, torch.Tensor.__array__, _BY_DLPACK})
"""Functions of torch that give code another name for a tensor's memory."""


def is_lent(tensor: torch.Tensor) -> bool:
    """Whether numpy or a buffer has the memory of a tensor too: torch cannot give it another size then."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return False
    return not unwrapped(tensor).untyped_storage().resizable()


class LentMemory:
    """What was in such memory when a tensor was read from it, in one run of some code."""

    def __init__(self) -> None:
        self.is_any = False
        self._contents: dict[tuple[int, int], bytes | int | None] = {}
        # Storages, which live as long as the run.
        self._given: set[int] = set()
        self._handed_out: set[int] = set()

    def give(self, tensors: Iterable[torch.Tensor]) -> None:
        """What the code is called with is other data each time, and is not looked at."""
        self._given.update(unwrapped(each).untyped_storage()._cdata for each in tensors if each.layout is torch.strided)

    def hand_out(self, func: Callable[..., Any], tensor: Any) -> None:
        """One of `HANDS_OUT` is called. What is there now was made by operators, which are known."""
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            return
        self.is_any = True
        tensor = unwrapped(tensor)
        if func is _BY_DLPACK:
            self._handed_out.add(tensor.untyped_storage()._cdata)
        self.know(tensor)

    def is_handed_out(self, tensor: torch.Tensor) -> bool:
        """Whether the code has asked for a tensor's memory in a way that leaves no trace in the tensor."""
        if not self._handed_out or tensor.layout is not torch.strided:
            return False
        return unwrapped(tensor).untyped_storage()._cdata in self._handed_out

    def know(self, tensor: torch.Tensor) -> None:
        """Keeps what is there."""
        tensor = unwrapped(tensor)
        if tensor.nbytes <= _LARGEST_BYTES:
            self._contents[_place_of(tensor)] = content_of(tensor)

    def news(self, tensor: torch.Tensor) -> bytes | int | None:
        """What is there when an operator reads the tensor, unless it was there before."""
        tensor = unwrapped(tensor)
        storage = tensor.untyped_storage()
        number = storage._cdata
        if tensor.nbytes > _LARGEST_BYTES or number in self._given:
            return None
        if storage.resizable() and number not in self._handed_out:
            return None
        content, place = content_of(tensor), _place_of(tensor)
        if self._contents.get(place) == content:
            return None
        self._contents[place] = content
        return content


def _place_of(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.nbytes
