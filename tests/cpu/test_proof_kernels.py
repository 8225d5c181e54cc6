"""Operators that a proof runs by torch's meta kernels give what `FakeTensorMode` gives: sizes, strides, places in memory, dtypes and devices."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from tightfit.effects.independence.meta_kernels import MetaKernels

aten = torch.ops.aten
_CALLS: dict[Any, Any] = {
    aten.view.default: lambda x, h: (x, [4, 30]),
    aten._unsafe_view.default: lambda x, h: (x, [20, 6]),
    aten.transpose.int: lambda x, h: (x, 1, 2),
    aten.permute.default: lambda x, h: (x, [2, 0, 1]),
    aten.expand.default: lambda x, h: (x.new_empty(4, 1, 6), [4, 5, 6]),
    aten.slice.Tensor: lambda x, h: (x, 1, 1, 9, 2),
    aten.select.int: lambda x, h: (x, 1, -1),
    aten.split.Tensor: lambda x, h: (x, 2, 2),
    aten.unbind.int: lambda x, h: (x, 0),
    aten.squeeze.dim: lambda x, h: (x.new_empty(4, 1, 6), 1),
    aten.add.Tensor: lambda x, h: (x.transpose(0, 1), h.transpose(0, 1)),
    aten.mul.Tensor: lambda x, h: (x[:, :1], x),
    aten.div.Tensor: lambda x, h: (x.long(), 2),
    aten.pow.Tensor_Scalar: lambda x, h: (x.transpose(0, 2), 2),
    aten.lt.Scalar: lambda x, h: (x.transpose(0, 2), 0.5),
    aten.where.self: lambda x, h: (x > 0, x, x.new_empty(())),
    aten.silu.default: lambda x, h: (x.transpose(1, 2),),
    aten.gelu.default: lambda x, h: (h.transpose(1, 2),),
    aten.mm.default: lambda x, h: (x.view(20, 6), x.view(20, 6).t()),
    aten.addmm.default: lambda x, h: (x.new_empty(3), x.view(20, 6), x.new_empty(3, 6).t()),
    aten.bmm.default: lambda x, h: (x, x.transpose(1, 2)),
    aten.sum.dim_IntList: lambda x, h: (x.transpose(0, 1), [1], True),
    aten.mean.dim: lambda x, h: (h.transpose(1, 2), [-1]),
    aten._softmax.default: lambda x, h: (x.transpose(1, 2), -1, False),
    aten._log_softmax.default: lambda x, h: (x.transpose(0, 1), 1, False),
    aten.cat.default: lambda x, h: ([x.transpose(1, 2), x.transpose(1, 2)], 1),
    aten.clone.default: lambda x, h: (x.transpose(1, 2),),
    aten.embedding.default: lambda x, h: (x.view(20, 6), x[0].long()),
    aten.tril.default: lambda x, h: (x.transpose(1, 2),),
    aten.any.dim: lambda x, h: (x > 0, 1),
}


@pytest.mark.parametrize("func", _CALLS, ids=str)
def test_they_are_those_of_fake_tensors(func: Any) -> None:
    mode = FakeTensorMode()
    with mode:
        x, h = torch.empty(4, 5, 6), torch.empty(4, 5, 6, dtype=torch.bfloat16)
        args = _CALLS[func](x, h)
    made = MetaKernels(mode).run(func, args, {})
    assert made is not NotImplemented
    with mode:
        expected = func(*args)
    assert type(made) is type(expected)
    assert list(_told(made, args)) == list(_told(expected, args))


def test_others_are_left_to_it() -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        x = torch.empty(4, 5)
    kernels = MetaKernels(mode)
    assert kernels.run(aten.add.Tensor, (x, torch.empty(4, 5)), {}) is NotImplemented
    assert kernels.run(aten.nonzero.default, (x,), {}) is NotImplemented
    assert kernels.run(aten.add.out, (x, x), {"out": x}) is NotImplemented
    assert kernels.run(aten.add_.Tensor, (x, 1), {}) is x


def _told(made: Any, args: Any) -> Iterator[Any]:
    storages = [each.untyped_storage()._cdata for each in tree_leaves(args) if isinstance(each, torch.Tensor)]
    for each in tree_leaves(made):
        memory = each.untyped_storage()._cdata
        yield each.shape, each.stride(), each.storage_offset(), each.dtype, each.device, each.fake_device
        yield storages.index(memory) if memory in storages else each.untyped_storage().nbytes()
