"""Sparse tensors (COO) on the virtual GPU: each consists of two dense tensors, indices and values, with ordinary storages."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch._subclasses.fake_tensor import FakeTensor

if TYPE_CHECKING:
    from tightfit.capture.dispatch.virtual import VirtualGpu

aten = torch.ops.aten


def parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The dense tensors that a sparse one is made of: its indices, then its values."""
    if tensor.layout == torch.sparse_coo:
        return (tensor._indices(), tensor._values())
    return ()


def num_bytes(tensor: torch.Tensor) -> int:
    """The bytes that a kernel touches of `tensor`: of a sparse one, those of its parts."""
    if tensor.layout == torch.strided:
        return tensor.numel() * tensor.element_size()
    return sum(part.numel() * part.element_size() for part in parts(tensor))


def virtual_of(gpu: VirtualGpu, host: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A sparse tensor on the card with the structure of `host`; `make` converts each of its dense parts."""
    made = [make(part) for part in parts(host)]
    common = {"dtype": host.dtype, "layout": host.layout, "device": torch.device("cuda", 0), "pin_memory": False}
    arguments = (host.sparse_dim(), host.dense_dim(), host.size(), *made)
    operator = aten._sparse_coo_tensor_with_dims_and_tensors.default
    out = gpu.fake.dispatch(operator, (FakeTensor,), arguments, common | {"is_coalesced": host.is_coalesced()})
    assert isinstance(out, torch.Tensor)
    return out


def host_of(virtual: torch.Tensor) -> torch.Tensor:
    """A sparse host tensor with the structure of `virtual`: as many elements, at distinct positions, with zero values."""
    values = torch.zeros(parts(virtual)[-1].size(), dtype=virtual.dtype, device="cpu")
    size, count = virtual.size()[: virtual.sparse_dim()], values.size(0)
    # Equal positions would be merged by `coalesce` on the host, and the result would hold less than the card's.
    places = torch.arange(count, device="cpu") % max(1, torch.Size(size).numel())
    indices = (
        torch.stack(torch.unravel_index(places, size))
        if size
        else torch.empty(0, count, dtype=torch.int64, device="cpu")
    )
    return torch.sparse_coo_tensor(
        indices, values, virtual.size(), check_invariants=False, is_coalesced=virtual.is_coalesced()
    )
