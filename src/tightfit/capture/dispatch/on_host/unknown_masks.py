"""Masks on the host that were copied from the GPU, where they have no values.

They read as False, so that no loop waits for them. What they select is all, as it is on the GPU: an estimate of nothing selected would be too small,
and programs that go on with at least one element of each row (the tokens of a completion up to its end) would end in an error.
"""

import functools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from tightfit.capture.dispatch.operators import tensors

aten = torch.ops.aten

_SELECTING = frozenset(
    (
        aten.index.Tensor,
        aten.index_put.default,
        aten.index_put_.default,
        aten._index_put_impl_.default,
        aten.masked_select.default,
        aten.nonzero.default,
        aten.nonzero_numpy.default,
    )
)
# Results that have the shape of a mask, and values of their own.
_OF_THEIR_OWN = frozenset(
    getattr(getattr(aten, name), overload)
    for name in ("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty")
    for overload in getattr(aten, name).overloads()
)


class UnknownMasks:
    """The storages of such masks."""

    def __init__(self) -> None:
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __bool__(self) -> bool:
        return bool(self._storages)

    def add(self, mask: Any) -> None:
        """Notes that nothing is known of `mask`, if it is one."""
        if _is_mask(mask):
            storage = mask.untyped_storage()
            address = storage._cdata
            self._storages[address] = weakref.ref(storage, functools.partial(self._storages.pop, address))

    def holds(self, tensor: Any) -> bool:
        """Whether `tensor` is such a mask, or a part of one."""
        return _is_mask(tensor) and tensor.untyped_storage()._cdata in self._storages

    def follow(self, operator: OpOverload, args: Sequence[Any], result: Any) -> None:
        """What is computed from such masks is one; what is written to them from elsewhere is known."""
        is_mutable = operator._schema.is_mutable
        if any(map(self.holds, tensors(args[1:] if is_mutable else args))):
            if operator not in _OF_THEIR_OWN:
                self.add(args[0] if is_mutable else result)
        elif is_mutable and self.holds(args[0]):
            self._storages.pop(args[0].untyped_storage()._cdata)

    def selecting(
        self, operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """The arguments of an operator, with a mask that selects all in place of each such mask by which it selects."""
        if operator not in _SELECTING:
            return args, kwargs
        num_targets = int(operator._schema.is_mutable)
        return (
            (*args[:num_targets], *map(self.all_of, args[num_targets:])),
            {name: self.all_of(value) for name, value in kwargs.items()},
        )

    def all_of(self, argument: Any) -> Any:
        """A mask that selects all in place of one that is unknown, also in a list."""
        if isinstance(argument, list | tuple):
            return [self.all_of(part) for part in argument]
        return torch.ones_like(argument) if self.holds(argument) else argument


def _is_mask(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.bool and value.layout == torch.strided
