"""Operators without a shape rule for fake tensors: run for real on the host, on zeros of the same shapes, to see the shapes of their outputs.

Zeros are valid indices, lengths and masks nearly everywhere. Known small values are used where there are any. Each operator that is run this
way is listed among the assumptions, once per line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
)
from torch.utils._pytree import tree_leaves, tree_map

from tightfit.capture.dispatch import sparse
from tightfit.capture.dispatch.on_host.hosts import MIN_MAPPED_BYTES, mapped_zeros
from tightfit.capture.dispatch.operators import facts
from tightfit.capture.dispatch.values.known_values import Unknown
from tightfit.errors import CaptureError
from tightfit.errors.faults import for_torch

if TYPE_CHECKING:
    from tightfit.capture.dispatch.virtual import VirtualGpu

UNSUPPORTED = (
    UnsupportedOperatorException,
    DynamicOutputShapeException,
    DataDependentOutputException,
    NotImplementedError,
)
"""What fake tensors raise for an operator that they cannot give the shape of."""

aten = torch.ops.aten

# The arguments are pages that are never written, unless the operator writes to them. What it returns, and computes on the way, takes memory of the host,
# and time: an operator that reads this much takes seconds.
MAX_HOST_BYTES = 4 << 30
_MAX_SAID = 160

# What torch says of arguments that do not belong together, on a card as on the host, whatever their values: the program is wrong.
_OF_THE_PROGRAM = re.compile(
    "did not match|same (?:d|scalar )type|expected scalar type|must match the size", re.IGNORECASE
)

_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}

# Where the size of a result depends on data and zeros would give the least: the arguments that give the most.
_LARGEST: Mapping[str, Callable[..., tuple[tuple[int, ...], torch.dtype]]] = {
    # With zeros all boxes are the same one, of which `nms` keeps a single one; a detector keeps hundreds in its
    # first steps.
    "torchvision::nms": lambda boxes, *_: ((boxes.size(0),), torch.int64),
}


def run(gpu: VirtualGpu, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The outputs of `func` as virtual tensors that are not recorded yet.

    Raises:
        CaptureError: the host cannot run it either, or not within `MAX_HOST_BYTES` of arguments.
    """
    name, where = facts(func).name, gpu.attribution.where()
    largest = _LARGEST.get(func.name())
    if largest is not None:
        size, dtype = largest(*args)
        gpu.recorder.assume(
            where, f"{name}: the size of the result depends on data; assumed to be as large as possible"
        )
        return gpu.empty(size, (1,) * len(size), dtype)
    asked = sum(sparse.num_bytes(a) for a in tree_leaves((args, kwargs)) if isinstance(a, FakeTensor))
    if asked > MAX_HOST_BYTES:
        raise CaptureError(
            f"{where}: {name} has no shape rule in torch {torch.__version__}, and its arguments ({asked >> 20} MiB) are too large to run it on the host; {_needs(func)}"
        )
    gpu.recorder.assume(where, f"{name}: torch has no shape rule for it; its sizes are those of a run on host zeros")
    call, result = _run_on_host(gpu, func, args, kwargs)
    return tree_map(call.virtual, result)


class _HostCall:
    """One run of an operator on the host. `is_wide`: in float32, for operators without a host kernel for smaller dtypes."""

    def __init__(self, gpu: VirtualGpu, *, is_wide: bool) -> None:
        self._gpu = gpu
        self._is_wide = is_wide
        self._narrow: torch.dtype | None = None
        self._arguments: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id: on the host, on the card

    def on_host(self, value: Any) -> Any:
        """An argument converted for the host."""
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if isinstance(value, torch.dtype):
            return _WIDER.get(value, value) if self._is_wide else value
        if not isinstance(value, FakeTensor):
            return value
        dtype = _WIDER.get(value.dtype, value.dtype) if self._is_wide else value.dtype
        if dtype != value.dtype:
            self._narrow = value.dtype
        host = _host_of(self._gpu, value, dtype)
        self._arguments[id(host)] = (host, value)
        return host

    def virtual(self, value: Any) -> Any:
        """A result as the card would return it: an argument again, a view of one, or a new tensor."""
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in self._arguments:
            return self._arguments[id(value)][1]
        gpu = self._gpu
        if value.layout != torch.strided:
            return sparse.virtual_of(gpu, value, self.virtual)
        for host, card in self._arguments.values():
            if host.layout == torch.strided and host.untyped_storage()._cdata == value.untyped_storage()._cdata:
                place = (card, value.size(), value.stride(), value.storage_offset())
                return gpu.fake.dispatch(aten.as_strided.default, (FakeTensor,), place, {})
        dtype = self._narrow if self._narrow is not None and value.dtype == _WIDER[self._narrow] else value.dtype
        return gpu.empty(value.size(), value.stride(), dtype)


def _run_on_host(
    gpu: VirtualGpu, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[_HostCall, Any]:
    failures: list[Exception] = []
    # Many host kernels have no float16 or bfloat16 (`"..." not implemented for 'Half'`), which CUDA has: the
    # second try computes in float32 and narrows the results again.
    for is_wide in (False, True):
        call = _HostCall(gpu, is_wide=is_wide)
        host_args, host_kwargs = tree_map(call.on_host, (tuple(args), dict(kwargs)))
        try:
            return call, func(*host_args, **host_kwargs)
        except (RuntimeError, NotImplementedError, IndexError, ValueError) as error:
            failures.append(error)
        if _OF_THE_PROGRAM.search(str(failures[0])):
            raise for_torch(failures[0]) from None
    said = (str(failures[0]).strip() or type(failures[0]).__name__).splitlines()[0][:_MAX_SAID]
    raise CaptureError(
        f"{gpu.attribution.where()}: {facts(func).name} has no shape rule in torch {torch.__version__}, and it did not run on the host: {said}; {_needs(func)}"
    ) from failures[0]


def _needs(func: OpOverload) -> str:
    return f'give its output shapes: torch.library.register_fake("{func.name()}") (docs/guide/targets.md, "Kernels of your own")'


def _host_of(gpu: VirtualGpu, virtual: FakeTensor, dtype: torch.dtype) -> torch.Tensor:
    if virtual.layout != torch.strided:
        return sparse.host_of(virtual).to(dtype)
    try:
        return gpu.known_values.values(virtual).clone().to(dtype)
    except Unknown:
        shape = torch.empty_strided(virtual.size(), virtual.stride(), dtype=dtype, device="meta")
        num_bytes = shape.untyped_storage().nbytes()
        if num_bytes >= MIN_MAPPED_BYTES:
            return mapped_zeros(num_bytes, shape)
        return torch.empty_strided(virtual.size(), virtual.stride(), dtype=dtype, device="cpu").zero_()
