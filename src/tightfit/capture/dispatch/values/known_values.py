"""Known values: the real contents of small device tensors, kept beside the virtual ones so that control flow that depends on them is right.

A tensor that is copied from the host, or made by a factory, has known values; an operator whose inputs are all known can be run for real on
the host when it is small. So `lengths.cuda().max().item()`, spatial shapes, time steps and masks made from indices are exact, while the
results of large kernels stay unknown. Values are kept per storage: views share them, and a write through one view is seen by all.
"""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map

from tightfit.capture.dispatch.operators import OperatorFacts, tensors, written

# At 64 KiB the mask of a padded batch of 32 x 512 would be unknown, and the batch taken for one without padding
# (docs/log.md, 2026-11-20).
MAX_INTEGER_BYTES = 1 << 20  # the padding mask of 128k tokens
MAX_FLOAT_BYTES = 1 << 10

_OR = {torch.ops.aten.bitwise_or.Tensor, torch.ops.aten.logical_or.default}
LOGICAL = _OR | {torch.ops.aten.bitwise_and.Tensor, torch.ops.aten.logical_and.default}
"""The operators whose result one of two arguments may decide."""

_UNRUNNABLE = (RuntimeError, NotImplementedError, IndexError, ValueError, TypeError)


class Unknown(Exception):
    """The value is not known."""


class ToldValues:
    """Which of some tensors told the program something, of their known values or of what was computed of them. Each has a bit; those that were drawn have one too."""

    DRAWN = 1

    def __init__(self, watched: Iterable[torch.Tensor]) -> None:
        self.told = 0
        self._of = {tensor.untyped_storage()._cdata: 2 << number for number, tensor in enumerate(watched)}

    def bits(self, values: Iterable[torch.Tensor]) -> int:
        """Of what the values of these tensors were computed."""
        bits = 0
        for tensor in values:
            if isinstance(tensor, FakeTensor) and tensor.layout == torch.strided:
                bits |= self._of.get(tensor.untyped_storage()._cdata, 0)
        return bits

    def note(self, operator: OpOverload, arguments: Sequence[Any], results: Iterable[torch.Tensor]) -> None:
        """An operator has computed these results."""
        bits = self.bits(tensors(arguments)) | (self.DRAWN if torch.Tag.nondeterministic_seeded in operator.tags else 0)
        for tensor in results:
            if isinstance(tensor, FakeTensor) and tensor.layout == torch.strided:
                self._of[tensor.untyped_storage()._cdata] = bits


class KnownValues:
    """Known values by the address of the virtual storage. `told`, while it is given, learns of those that the host reads."""

    def __init__(self) -> None:
        self.told: ToldValues | None = None
        self._storages: dict[int, torch.UntypedStorage] = {}
        self.random_state = torch.Generator().manual_seed(0).get_state()

    def adopt(self, virtual: torch.Tensor, values: torch.Tensor) -> None:
        """Keeps `values` for the new storage of `virtual`, if it is small."""
        if virtual.layout != torch.strided:
            return
        storage = virtual.untyped_storage()
        num_bytes = storage.nbytes()
        if num_bytes > limit(virtual.dtype):
            return
        # Plain bytes, so that a view of another dtype (`view(torch.int32)`) reads the same memory.
        self._storages[storage._cdata] = torch.empty(num_bytes, dtype=torch.uint8, device="cpu").untyped_storage()
        kept = self.values(virtual)
        extent = 1 + sum((size - 1) * stride for size, stride in zip(kept.shape, kept.stride(), strict=True))
        if 0 < extent < kept.numel() and kept.stride() == values.stride():
            # Several elements are one place of the memory (`empty_strided`), and such a tensor is not written to.
            kept, values = (each.as_strided((extent,), (1,)) for each in (kept, values))
        kept.copy_(values)

    def values(self, virtual: torch.Tensor) -> torch.Tensor:
        """The values of `virtual`, as a host tensor that shares the kept storage.

        Raises:
            Unknown: they are not known.
        """
        if not self.known(virtual):
            raise Unknown
        if self.told is not None:
            self.told.told |= self.told.bits((virtual,))
        storage = self._storages[virtual.untyped_storage()._cdata]
        return torch.empty(0, dtype=virtual.dtype, device="cpu").set_(
            storage, virtual.storage_offset(), virtual.size(), virtual.stride()
        )

    def known(self, virtual: torch.Tensor) -> bool:
        """Whether the values of `virtual` are kept. Those of a gradient that a technique makes only when it is asked for are not: asking would make it."""
        if not isinstance(virtual, FakeTensor) or virtual.layout != torch.strided:
            return False
        return virtual.untyped_storage()._cdata in self._storages

    def forget(self, storage_address: int) -> None:
        """The storage was freed, or was written with unknown values."""
        self._storages.pop(storage_address, None)

    def forget_written(self, targets: Iterable[torch.Tensor]) -> None:
        """What was written with unknown values is unknown from now on, also through every view of it."""
        for tensor in targets:
            if isinstance(tensor, FakeTensor) and tensor.layout == torch.strided:
                self.forget(tensor.untyped_storage()._cdata)

    def follow(
        self,
        operator: OpOverload,
        known: OperatorFacts,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        outputs: Sequence[torch.Tensor],
    ) -> None:
        """Computes the values of the outputs of an operator, and of what it writes to, where those of its arguments are known."""
        told, self.told = self.told, None
        try:
            first = next(tensors(args), None)
            targets = list(written(operator, args, kwargs)) if known.is_mutable else []
            small = all(map(is_small, outputs))
            # A factory has no tensor among its arguments; its values are known by its arguments alone (`arange`,
            # `zeros`).
            if small and (first is None or not isinstance(first, FakeTensor) or self.known(first)):
                try:
                    values = self.run(operator, args, kwargs)
                except Unknown:
                    pass
                else:
                    if not targets:
                        _adopt_alike(self, outputs, values)
                    return
            if small and operator in LOGICAL:
                with contextlib.suppress(Unknown):
                    self.adopt(outputs[0], self.decided(operator, args))
            self.forget_written(targets)
        finally:
            self.told = told
            if told is not None:
                told.note(
                    operator,
                    (*args, *kwargs.values()),
                    (*outputs, *(written(operator, args, kwargs) if known.is_mutable else ())),
                )

    def run(self, operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The result of `operator` on the known values of its arguments.

        Raises:
            Unknown: an argument is not known, or the host cannot run the operator.
        """
        host_kwargs = {k: _on_host(v) for k, v in kwargs.items() if k not in ("generator", "pin_memory")}
        host_args, host_kwargs = tree_map(self._value_of, (tuple(args), host_kwargs))
        is_random = torch.Tag.nondeterministic_seeded in operator.tags
        outer = self._exchange_random_state() if is_random else None
        try:
            return operator(*host_args, **host_kwargs)
        except _UNRUNNABLE as error:
            raise Unknown from error
        finally:
            if outer is not None:
                self.random_state = torch.get_rng_state()
                torch.set_rng_state(outer)

    def decided(self, operator: OpOverload, args: Sequence[Any]) -> torch.Tensor:
        """The result of a `LOGICAL` operator with one unknown argument that the known one decides: `x | True`, `x & False`.

        A `generate` ends by it on a virtual GPU: a sequence is complete if it has all its tokens (known) or ended by itself (unknown).

        Raises:
            Unknown: what is known does not decide it.
        """
        for arg, other in (args, reversed(args)):
            if not self.known(arg):
                continue
            values = self.values(arg)
            # An integer that is not 0 does not decide an OR of bits.
            is_decided = values.dtype == torch.bool and values.all() if operator in _OR else not values.any()
            if is_decided and (operator not in _OR or other.dtype == torch.bool):
                return operator(values, torch.zeros(other.shape, dtype=other.dtype, device="cpu"))
        raise Unknown

    def _exchange_random_state(self) -> torch.Tensor:
        """The card has a random state of its own: what it draws leaves the host's random state as it is."""
        outer = torch.get_rng_state()
        torch.set_rng_state(self.random_state)
        return outer

    def _value_of(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            return self.values(value)
        return value


def _adopt_alike(known: KnownValues, outputs: Sequence[torch.Tensor], values: Any) -> None:
    """Keeps the results of a kernel of the host that are like a card's; it may give others beside the first: statistics, buffers for the backward pass."""
    found = list(tensors(values if isinstance(values, list | tuple) else (values,)))
    if len(found) == len(outputs):
        for tensor, value in zip(outputs, found, strict=True):
            if (tensor.shape, tensor.dtype) == (value.shape, value.dtype):
                known.adopt(tensor, value)


def is_small(tensor: torch.Tensor) -> bool:
    """Whether the values of a tensor of that size are kept, if they are known."""
    return tensor.layout == torch.strided and tensor.numel() * tensor.element_size() <= limit(tensor.dtype)


def limit(dtype: torch.dtype) -> int:
    """The most bytes that are kept of a tensor: many for indices and masks, few for floating-point data."""
    return MAX_FLOAT_BYTES if dtype.is_floating_point or dtype.is_complex else MAX_INTEGER_BYTES


def _on_host(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) else value
