"""Which booleans of unknown data read as True.

A condition on unknown data reads as False: no overflow, no infinity, nothing to skip. The negated forms of these conditions must read as True:
all values are finite, a number equals itself, there is no NaN. What is counted of infinities and NaNs is 0, also where a program converts and adds up what
it has found before it reads it.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

aten = torch.ops.aten

# `torch.distributions` validates its parameters with `.all()`: read as False, every script that makes a Normal
# would end there (docs/log.md, 2026-11-20).
_ALL = {aten.all.default, aten.all.dim, aten.all.dims, aten._is_all_true.default, aten.isfinite.default}
_ANY = {aten.any.default, aten.any.dim, aten.any.dims, aten._is_any_true.default, aten.clone.default}
# `mul` is an AND between booleans: `isfinite` is the composite (x == x) * (x.abs() != inf) (TensorCompare.cpp),
# and `isnan` is x != x.
_AND = {aten.mul.Tensor, aten.logical_and.default, aten.bitwise_and.Tensor}
_OR = {aten.logical_or.default, aten.bitwise_or.Tensor}
_NOT = {aten.logical_not.default, aten.bitwise_not.default}

_ASKS_FOR_INFINITE = {aten.isnan.default, aten.isinf.default, aten.ne.Tensor, aten.eq.Scalar}
_PASSES_ON = {aten._to_copy.default, aten.max.default, aten.amax.default, aten.sum.default, aten.any.default, *_OR}
ABOUT_FINITE = frozenset(_ASKS_FOR_INFINITE | _PASSES_ON)


class DataDependentConditions:
    """The storages of booleans that read as True, by their addresses."""

    def __init__(self) -> None:
        self._addresses: set[int] = set()
        self._not_finite: set[int] = set()  # what says where values are infinite or no numbers: nowhere

    def follow(self, operator: OpOverload, args: Sequence[Any], out: torch.Tensor) -> None:
        """Called with the result of each operator that returns booleans."""
        if self._reads_true(operator, args):
            self._addresses.update(_addresses(out))

    def _reads_true(self, operator: OpOverload, args: Sequence[Any]) -> bool:
        if operator in _AND:
            return all(map(self.holds, args[:2]))
        if operator in _OR:
            return any(map(self.holds, args[:2]))
        if operator in _NOT:
            return not self.holds(args[0])
        if operator in _ANY:
            return self.holds(args[0])
        return (
            operator in _ALL
            or (operator is aten.eq.Tensor and _is_same(args[0], args[1]))
            or (operator is aten.ne.Scalar and isinstance(args[1], float) and math.isinf(args[1]))
        )

    def counts_nothing(self, operator: OpOverload, args: Sequence[Any], out: torch.Tensor) -> bool:
        """Whether `out` says where values are not finite, or how many are. Called with the results of the operators `ABOUT_FINITE`."""
        if operator in _PASSES_ON:
            counts = all(self._is_of_infinite(a) for a in args[: 2 if operator in _OR else 1])
        elif operator is aten.ne.Tensor:
            counts = _is_same(args[0], args[1])
        elif operator is aten.eq.Scalar:
            counts = isinstance(args[1], float) and math.isinf(args[1])
        else:
            counts = True
        if counts:
            self._not_finite.update(_addresses(out))
        return counts

    def _is_of_infinite(self, value: Any) -> bool:
        return not self._not_finite.isdisjoint(_addresses(value))

    def is_about(self, tensor: torch.Tensor) -> bool:
        """Whether something of its values is known: that they are true, or say where there is no number."""
        return self.holds(tensor) or self._is_of_infinite(tensor)

    def written(self, targets: Iterable[torch.Tensor]) -> None:
        """Tensors were written to: what they say is not known any more."""
        if self._not_finite:
            self._not_finite.difference_update(address for target in targets for address in _addresses(target))

    def holds(self, tensor: Any) -> bool:
        """Whether `tensor` reads as True."""
        return not self._addresses.isdisjoint(_addresses(tensor))

    def forget(self, address: int) -> None:
        """The storage was freed."""
        self._addresses.discard(address)
        self._not_finite.discard(address)


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (
        _addresses(one) != ()
        and _addresses(one) == _addresses(other)
        and one.shape == other.shape
        and one.storage_offset() == other.storage_offset()
    )


def _addresses(value: Any) -> tuple[int, ...]:
    """The address of the storage of `value`. A sparse tensor has none, and a gradient that a technique makes only when it is asked for would be made."""
    if isinstance(value, FakeTensor) and value.layout == torch.strided:
        return (value.untyped_storage()._cdata,)
    return ()
