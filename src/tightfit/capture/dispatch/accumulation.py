"""In-place accumulation in the backward pass: autograd writes into buffers that nothing else refers to, but not for tensors without data.

Two places. Where a tensor is used twice, the gradients of its uses are added, into the first of them if it has no other owner
(torch/csrc/autograd/input_buffer.cpp, `can_accumulate_inplace`). And the backward of a selection (gather, max over a dimension, topk, sort,
index, take, index_select, masked_select ...) fills a tensor of zeros that it has just made: in place, unless a dispatch mode is on, which
counts as a tensor subclass (`isTensorSubclassLike`, aten/src/ATen/TensorSubclassLikeUtils.h; used so in FunctionsManual.cpp,
TensorAdvancedIndexing.cpp and ReduceOps.cpp). The decision is repeated here: a tensor that the engine itself writes into is overwritten, if it
is dense and its storage has no other owner.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from tightfit.capture.dispatch.handlers import HANDLERS
from tightfit.capture.dispatch.operators import is_dense, tensors
from tightfit.capture.dispatch.virtual import Handler, VirtualGpu
from tightfit.tape import Phase

aten = torch.ops.aten

# Frames are recognised by folder and not counted: when a wrapper was once put between dispatch and handler, no
# gradient was accumulated in place any more (docs/log.md, 2026-11-22).
# The dispatch itself (this file, the virtual GPU with its handlers) and torch's wrappers of it.
_DISPATCH = (
    str(Path(__file__).parents[1]),
    *(str(Path(torch.__file__).parent / name) for name in ("_compile.py", "_dynamo")),
)
# One owner is the tensor, the other the Python object of the storage, by which its end is noticed.
_NUM_OWNERS_OF_SOLE_STORAGE = 2

_IN_PLACE: dict[OpOverload, OpOverload] = {
    aten.add.Tensor: aten.add_.Tensor,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.scatter.src: aten.scatter_.src,
    aten.index_put.default: aten._index_put_impl_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.put.default: aten.put_.default,
    aten.masked_scatter.default: aten.masked_scatter_.default,
}


def _write(gpu: VirtualGpu, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    held = args[0]
    if gpu.recorder.phase == Phase.BACKWARD and _is_called_by_engine() and _can_be_overwritten(func, args):
        # Everything but `add` writes into zeros that the formula has just made; `at::index_put` and its like
        # take the out-of-place branch there only because a dispatch mode is on.
        func = _IN_PLACE[func]
        _run(gpu, func, args, kwargs)
        return gpu.run(aten.alias.default, (held,), {})
    return _run(gpu, func, args, kwargs)


def _run(gpu: VirtualGpu, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    handler = HANDLERS.get(func)
    return handler(gpu, func, args, kwargs) if handler else gpu.run(func, args, kwargs)


def _is_called_by_engine() -> bool:
    """Whether the engine called the operator directly. Code in Python on the stack, the user's or torch's, has itself decided how it writes."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_DISPATCH):
        frame = frame.f_back
    return frame is None


def _can_be_overwritten(func: OpOverload, args: Sequence[Any]) -> bool:
    held = args[0]
    if not isinstance(held, FakeTensor) or held.layout != torch.strided:
        return False
    storage = held.untyped_storage()._cdata
    # The engine adds gradients of one tensor, which have one shape; a sum that broadcasts is some other node's
    # own.
    if func is aten.add.Tensor and not (isinstance(args[1], FakeTensor) and args[1].shape == held.shape):
        return False
    return (
        all(t.layout == torch.strided and t.untyped_storage()._cdata != storage for t in tensors(args[1:]))
        and torch._C._storage_Use_Count(storage) == _NUM_OWNERS_OF_SOLE_STORAGE
        and is_dense(held)
    )


ACCUMULATION_HANDLERS: dict[OpOverload, Handler] = dict.fromkeys(_IN_PLACE, _write)
