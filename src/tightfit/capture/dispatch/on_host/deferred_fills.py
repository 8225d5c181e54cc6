"""What initialisers would have written to blank tensors of the host: written when the program reads one as data, its labels or inputs say.

Weights are never read, and what is drawn for them takes most of the time of a large model's set-up. Of what is read, so much is written and no more: a program
that looks at each weight of a large model would fill the host's memory.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from tightfit.units import GIB

MAX_WRITTEN_BYTES = GIB


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Fill:
    """An operator that writes to the elements of a storage that lie so."""

    operator: OpOverload
    place: tuple[Sequence[int], Sequence[int], int]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


class DeferredFills:
    """The writes that were left out, by the address of the storage, in order."""

    def __init__(self) -> None:
        self._fills: dict[int, list[_Fill]] = {}
        self._num_written = 0

    def begin(self, tensor: torch.Tensor) -> None:
        """A new blank tensor, where another one may have been."""
        self._fills[tensor.untyped_storage()._cdata] = []

    def add(self, operator: OpOverload, tensor: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """`operator` writes to `tensor`, with these arguments behind it."""
        place = (tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset()))
        values = tuple(
            value.clone() if isinstance(value, torch.Tensor) and not value.dim() else value for value in args
        )
        fills = self._fills.get(tensor.untyped_storage()._cdata)
        if fills is None:
            return
        if any(isinstance(value, torch.Tensor) and value.dim() for value in values):
            # Its values may be gone by then.
            del self._fills[tensor.untyped_storage()._cdata]
            return
        fills.append(_Fill(operator=operator, place=place, args=values, kwargs=dict(kwargs)))

    def can_copy(self, source: torch.Tensor) -> bool:
        """Whether a copy of `source` would be filled as it is: it is the whole of its storage, or nothing was left out."""
        return not self.has(source) or source.nbytes == source.untyped_storage().nbytes()

    def copy(self, source: torch.Tensor, copied: torch.Tensor) -> None:
        """`copied` is a blank copy of `source`."""
        fills = self._fills.get(source.untyped_storage()._cdata)
        if fills is None or source.stride() != copied.stride():
            self._fills.pop(copied.untyped_storage()._cdata, None)
        else:
            self._fills[copied.untyped_storage()._cdata] = list(fills)

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether something was left out of what `tensor` would hold."""
        return bool(self._fills.get(tensor.untyped_storage()._cdata))

    def write(self, tensor: torch.Tensor) -> bool:
        """Writes what was left out to the storage of `tensor`, which is read; whether there was room."""
        storage = tensor.untyped_storage()
        if self._num_written + storage.nbytes() > MAX_WRITTEN_BYTES:
            return False
        self._num_written += storage.nbytes()
        for fill in self._fills.pop(storage._cdata):
            size, stride, offset = fill.place
            fill.operator(
                torch.empty(0, dtype=tensor.dtype, device="cpu").set_(storage, offset, size, stride),
                *fill.args,
                **fill.kwargs,
            )
        return True
