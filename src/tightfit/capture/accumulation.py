"""Where a tensor is used twice, autograd adds the gradients of its uses, in place if nobody else holds the first of them.

Autograd decides that by counting references, and never adds in place while tensors without data are in play, so a residual network would
seem to hold one gradient more than it does. The decision is made again here, by the same rule (torch/csrc/autograd/input_buffer.cpp,
`can_accumulate_inplace`): the sum replaces the first gradient if it is dense and its storage has no other owner.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._ops import OpOverload
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch._subclasses.fake_tensor import FakeTensor

from tightfit.capture.operators import facts
from tightfit.capture.virtual import Handler, VirtualGpu
from tightfit.tape import Phase

aten = torch.ops.aten

_WRAPPERS = tuple(str(Path(torch.__file__).parent / name) for name in ("_compile.py", "_dynamo"))
# One owner is the tensor, the other the Python object of the storage, by which its end is noticed.
_NUM_OWNERS_OF_SOLE_STORAGE = 2


def _add(gpu: VirtualGpu, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    held, added = args[:2]
    if not (gpu.recorder.phase == Phase.BACKWARD and _is_called_by_engine() and _can_be_overwritten(held, added)):
        return gpu.run(func, args, kwargs)
    gpu.note_operator(aten.add_.Tensor, facts(aten.add_.Tensor), args, kwargs, (held,), None)
    gpu.shadows.forget(held.untyped_storage()._cdata)
    return gpu.fake.dispatch(aten.alias.default, (), (held,), {})


def _is_called_by_engine() -> bool:
    """Whether no code but the dispatch itself (this, the handler, the mode, torch's wrappers of it) stands below autograd."""
    frame = sys._getframe(2).f_back
    while frame is not None and frame.f_code.co_filename.startswith(_WRAPPERS):
        frame = frame.f_back
    return frame is None


def _can_be_overwritten(held: Any, added: Any) -> bool:
    if not (isinstance(held, FakeTensor) and isinstance(added, FakeTensor)) or held.layout != torch.strided:
        return False
    storage = held.untyped_storage()._cdata
    return (
        held.shape == added.shape
        and storage != added.untyped_storage()._cdata
        and torch._C._storage_Use_Count(storage) == _NUM_OWNERS_OF_SOLE_STORAGE
        and is_non_overlapping_and_dense_or_false(held)
    )


ACCUMULATION_HANDLERS: dict[OpOverload, Handler] = {aten.add.Tensor: _add}
