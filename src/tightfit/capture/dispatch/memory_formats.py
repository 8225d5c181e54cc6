"""Memory format of convolution outputs, as cuDNN chooses it: channels-last as soon as the input or the weight is.

A build of torch without CUDA takes another backend for a `cuda` tensor and returns channels-first. The memory format decides which later
operators must copy, and whether a weight's gradient is kept as it is or copied to the format of the weight.
"""

import functools
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

    # No function that calls itself: it would be in a cycle with its cell, and keep the weight until cycles are collected.
    return gpu.run(func, args, kwargs, functools.partial(_relaid, gpu, weight.dim(), layout))


def _relaid(gpu: VirtualGpu, num_dims: int, layout: torch.memory_format, value: Any) -> Any:
    """The outputs with `num_dims` dimensions in another memory format."""
    if isinstance(value, tuple | list):
        return tuple(_relaid(gpu, num_dims, layout, item) for item in value)
    # The third output of `convolution_backward` is the bias's gradient, which has one dimension and no memory format.
    if isinstance(value, torch.Tensor) and value.dim() == num_dims:
        return gpu.fake.dispatch(aten.clone.default, (), (value,), {"memory_format": layout})
    return value


LAYOUT_HANDLERS: dict[OpOverload, Handler] = dict.fromkeys(
    (aten.convolution.default, aten.convolution_backward.default), _convolution
)
