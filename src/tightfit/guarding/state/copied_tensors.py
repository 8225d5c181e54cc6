"""Copies of tensors that steps write to, to write them back."""

import dataclasses

import torch

from tightfit.guarding.memory.out_of_memory import release_memory


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """A tensor, and what it held at `version`."""

    tensor: torch.Tensor
    copy: torch.Tensor
    version: int

    @classmethod
    def of(cls, tensor: torch.Tensor, *, on_card: bool) -> "Copied":
        """The copy lies beside the tensor with `on_card`, if there is room, or at the host."""
        with torch.no_grad():
            value = tensor.detach()
            if on_card:
                try:
                    return cls(tensor=tensor, copy=value.clone(), version=tensor._version)
                except torch.OutOfMemoryError:
                    release_memory()
            return cls(tensor=tensor, copy=value.to("cpu", copy=True), version=tensor._version)

    def put(self) -> None:
        """Writes it back."""
        # What was written past torch has the same version. So has what was not written to: a graph of an earlier step may have saved it.
        is_counted = self.tensor._version != self.version
        with torch.no_grad():
            (self.tensor if is_counted else self.tensor.data).copy_(self.copy)
