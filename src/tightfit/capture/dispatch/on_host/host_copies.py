"""Notes copies between host and card on the tape: their way, their bytes, and whether the host waits for them.

As torch makes them (aten/src/ATen/native/cuda/Copy.cu): types are converted, and layouts made equal, on the side of the source first, in a pageable
temporary where that is the host; a copy that is not `non_blocking` ends with a synchronisation of the stream. A `non_blocking` one from or to
pageable memory waits all the same, since the driver moves it through a pinned buffer of its own (CUDA Runtime API, "API synchronization behavior"),
but for small ones to the card.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload

from tightfit.capture.dispatch import sparse
from tightfit.capture.dispatch.operators import facts, is_dense
from tightfit.tape import CopyDirection

if TYPE_CHECKING:
    from tightfit.capture.dispatch.virtual import VirtualGpu

_COPY = torch.ops.aten.copy_.default
# "For transfers from pageable host memory to device memory of 64 KB or less" the call returns before the copy is complete (same page).
_STAGED_BYTES = 64 << 10


def is_non_blocking(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a `_to_copy` or `copy_` was called with `non_blocking`."""
    if func is _COPY and len(args) > 2:
        return bool(args[2])
    return bool(kwargs.get("non_blocking"))


def note_to_card(
    gpu: VirtualGpu, source: torch.Tensor, target: torch.Tensor, dtype: torch.dtype, *, non_blocking: bool
) -> None:
    """The last operator copies `source`, on the host, to `target`, as elements of type `dtype`."""
    num_bytes = sparse.num_bytes(source)
    if source.layout == torch.strided:
        # What is expanded (stride 0) is written out before it is copied.
        num_bytes = target.numel() * dtype.itemsize
    if not num_bytes:
        return
    is_pinned = gpu.host.storages.is_page_locked(source) and _is_direct(source, target)
    is_staged = not is_pinned and num_bytes <= _STAGED_BYTES
    gpu.recorder.copy(
        CopyDirection.TO_CARD,
        num_bytes,
        is_pinned=is_pinned,
        is_blocking=not (non_blocking and (is_pinned or is_staged)),
    )


def note_to_host(gpu: VirtualGpu, source: torch.Tensor, target: torch.Tensor, *, non_blocking: bool) -> None:
    """An operator that copies `source`, on the card, to `target`, on the host."""
    num_bytes = target.numel() * target.element_size() if target.layout == torch.strided else sparse.num_bytes(source)
    if not num_bytes:
        return
    # Also for `.cpu()`, which ends in it: `_to_copy` is a cast to who looks for casts by name.
    gpu.operators.note(_COPY, facts(_COPY), (target, source), {}, (target,), None)
    is_pinned = gpu.host.storages.is_page_locked(target) and (target.is_contiguous() or _is_direct(source, target))
    gpu.recorder.copy(
        CopyDirection.TO_HOST, num_bytes, is_pinned=is_pinned, is_blocking=not (non_blocking and is_pinned)
    )


def _is_direct(source: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether the bytes are copied as they lie."""
    return (
        source.dtype == target.dtype
        and source.size() == target.size()
        and source.stride() == target.stride()
        and is_dense(source)
    )
