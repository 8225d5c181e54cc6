"""Tensors that are one memory under two names: what is written to one is in the other."""

from collections.abc import Iterable

import torch

from tightfit.effects.values.contents import content_of


def storage_of(tensor: torch.Tensor) -> int:
    """A number of the memory that a tensor lies in, as long as it lives."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one storage may share an element: the chunks of a tensor do not, along any dimension."""
    if storage_of(one) != storage_of(other) or not one.numel() or not other.numel():
        return False
    if one.dim() != other.dim():
        return True
    dims = [dim for dim in range(one.dim()) if one.shape[dim] > 1 or other.shape[dim] > 1]
    if any(one.stride(dim) != other.stride(dim) for dim in dims):
        return True
    first, second = int(one.storage_offset()), int(other.storage_offset())
    for dim in sorted(dims, key=lambda dim: -one.stride(dim)):
        stride = one.stride(dim)
        if not stride:
            continue
        (begin, first), (start, second) = divmod(first, stride), divmod(second, stride)
        if begin + one.shape[dim] <= start or start + other.shape[dim] <= begin:
            return False
    return first == second


class OneMemory:
    """Tensors of the program's that have a memory of their own here, and not in a plain run."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        # An alias has the same count of versions, which a write through `.data` does not change.
        self._known = [(each.detach(), each._version, content_of(each)) for each in tensors]

    def is_any_written(self) -> bool:
        """Whether one was written to, at the host also past autograd."""
        return any(alias._version != version or content_of(alias) != content for alias, version, content in self._known)
