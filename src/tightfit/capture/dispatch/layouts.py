"""Convolutions lay their results out as cuDNN does: channels-last as soon as the input or the weight lies so.

A build of torch without CUDA would take another backend for a `cuda` tensor and lay the result out channels-first. The layout decides which
later operators must copy, and whether a weight's gradient can be kept as it is or is copied to the layout of the weight.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from tightfit.capture.dispatch.virtual import Handler, VirtualGpu
from tightfit.capture.kernels.convolution import output_memory_format, runs_natively
from tightfit.capture.kernels.scratch import bind

aten = torch.ops.aten


def _convolution(gpu: VirtualGpu, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    call = bind(func, args, kwargs)
    tensor, weight = call["input"], call["weight"]
    layout = output_memory_format(tensor, weight)
    if layout is torch.contiguous_format or runs_natively(
        tensor, weight, call["stride"], call["dilation"], call["groups"]
    ):
        return gpu.run(func, args, kwargs)

    def relaid(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return tuple(relaid(item) for item in value)
        if isinstance(value, torch.Tensor) and value.dim() == weight.dim():
            return gpu.fake.dispatch(aten.clone.default, (), (value,), {"memory_format": layout})
        return value

    return gpu.run(func, args, kwargs, relaid)


LAYOUT_HANDLERS: dict[OpOverload, Handler] = dict.fromkeys(
    (aten.convolution.default, aten.convolution_backward.default), _convolution
)
