"""Where the tensors of a run on fake tensors are from: another one of two that are alike, chosen by the number of rows, is another computation."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

Source = tuple[Any, ...] | None
"""As in `Sources.of`."""


class Sources:
    """Those of one run: tensors that were there before it have a name that is the same in all runs, others the number of the operator that has made their memory."""

    def __init__(self) -> None:
        self._names: dict[int, Any] = {}
        self._made: dict[int, tuple[int, int]] = {}

    def name(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        """Names tensors that are there before the run by their place in this order."""
        for number, tensor in enumerate(tensors):
            if tensor.layout is torch.strided:
                self._names.setdefault(_key_of(tensor), (kind, number))

    def made(self, outputs: Sequence[torch.Tensor], number: int) -> None:
        """Operator `number` has returned these."""
        for place, output in enumerate(outputs):
            if _key_of(output) not in self._names:
                self._made.setdefault(_key_of(output), (number, place))

    def of(self, tensor: torch.Tensor) -> Source:
        """The name of a tensor and its place in its memory, or what has made it; None where neither is known."""
        key = _key_of(tensor)
        name = self._names.get(key)
        return self._made.get(key) if name is None else ("", name, tensor.storage_offset())


def are_alike(one: Source, other: Source, *, is_of_one: bool) -> bool:
    """Whether two tensors are from the same place. `is_of_one`: where one run has one row, operators are left out there, and all that follow are of other numbers."""
    if one == other or one is None or other is None:
        return True
    return is_of_one and not (len(one) == len(other) == _NUM_OF_NAMED)


_NUM_OF_NAMED = 3


def _key_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
