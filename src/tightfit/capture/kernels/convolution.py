"""Convolutions: the memory format that cuDNN chooses for the output, and its workspace.

There is no public table of cuDNN's choices. The model: its tensor-core kernels read channels-last tensors, so channels-first tensors are
converted in the workspace, input, filter and output each once, with channels padded to the width of a tensor-core load. On cards or dtypes
without tensor cores it runs kernels that need next to nothing, or Winograd transforms. Every number without a source is a field of
`Physics`, with its meaning, and can be calibrated.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format

from tightfit.capture.kernels.architecture import Card
from tightfit.capture.kernels.reductions import reduction_buffers
from tightfit.capture.kernels.rule import (
    Arguments,
    Outputs,
    Rule,
    Uncertain,
    accumulate_size,
    contiguous_copy,
    round_up,
)
from tightfit.capture.kernels.tf32 import convolves_in_tf32

aten = torch.ops.aten

Direction = Literal["forward", "backward_input", "backward_weight"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Physics:
    """The assumptions about cuDNN's engines, in one place."""

    channel_bytes: int = 16  # channels are padded so that one pixel is a multiple of one 128-bit load
    alignment_bytes: int = 256  # each operand in the workspace starts aligned
    weight_splits: int = 1  # float32 copies of the filter's gradient that a half-precision kernel accumulates in
    max_weight_splits: int = 16  # and the most that a split along the batch may use
    conversions_at_most: int = 2  # an operand may be held twice, padded and transformed
    winograd_tile: int = 4  # output pixels of a Winograd tile along one side


# Not fitted: on 39 networks measured on an A100 no other scale of the workspaces was better by more than the
# noise (docs/log.md, "cuDNN's workspaces on an A100").
PHYSICS = Physics()


def output_memory_format(tensor: torch.Tensor, weight: torch.Tensor) -> torch.memory_format:
    """The memory format of a convolution's output, of its input's gradient and of its weight's gradient on a card with cuDNN.

    Channels-last if the input or the weight is, and never for float64. Source: `cudnn_conv_suggest_memory_format`, ConvUtils.h.
    """
    if torch.float64 in (tensor.dtype, weight.dtype):
        return torch.contiguous_format
    formats = (suggest_memory_format(tensor), suggest_memory_format(weight))
    wanted = {4: torch.channels_last, 5: torch.channels_last_3d}.get(weight.dim())
    return wanted if wanted in formats else torch.contiguous_format


def is_depthwise(channels: int, weight_shape: Sequence[int], groups: int) -> bool:
    """Whether every group has one input channel (`is_depthwise`, Convolution.cpp)."""
    return groups > 1 and channels == groups and weight_shape[0] % channels == 0


def runs_natively(
    tensor: torch.Tensor, weight: torch.Tensor, stride: Sequence[int], dilation: Sequence[int], groups: int
) -> bool:
    """Whether PyTorch's own depthwise kernel runs instead of cuDNN; it takes no workspace (`use_cudnn_depthwise`, Convolution.cpp)."""
    if weight.dim() not in (4, 5) or not is_depthwise(tensor.shape[1], weight.shape, groups):
        return False
    if output_memory_format(tensor, weight) is not torch.contiguous_format:
        return False
    cudnn = (
        tensor.dtype == weight.dtype == torch.float16
        and weight.dim() == 4
        and set(dilation) == {1}
        and len(set(stride)) == 1
        and tensor.shape[1] >= 32
        and weight.shape[2] in (1, 3, 5)
        and weight.shape[2] == weight.shape[3]
    )
    return not cudnn


def _uses_tensor_cores(dtype: torch.dtype, card: Card) -> bool:
    if dtype is torch.float16:
        return card.compute_capability >= (7, 0)
    if dtype is torch.bfloat16:
        return card.compute_capability >= (8, 0)
    # TF32 counts: torch allows it for convolutions by default (`torch.backends.cudnn.allow_tf32`), unlike for
    # products.
    return dtype is torch.float32 and card.compute_capability >= (8, 0) and convolves_in_tf32()


def _converted(shape: Sequence[int], element_bytes: int, physics: Physics) -> int:
    channels = round_up(shape[1], physics.channel_bytes // element_bytes)
    return round_up(shape[0] * channels * math.prod(shape[2:]) * element_bytes, physics.alignment_bytes)


def _winograd_bytes(
    input_shape: Sequence[int], weight_shape: Sequence[int], output_shape: Sequence[int], physics: Physics
) -> int:
    tile = physics.winograd_tile
    # An output tile of m x m needs (m + r - 1) x (m + r - 1) transformed inputs for a filter of r x r (Lavin
    # and Gray 2015, "Fast Algorithms for Convolutional Neural Networks").
    grown = (tile + weight_shape[2] - 1) ** 2
    tiles = output_shape[0] * math.prod(-(-size // tile) for size in output_shape[2:])
    return grown * (tiles * (input_shape[1] + output_shape[1]) + weight_shape[0] * weight_shape[1]) * 4


def convolution_workspace_bytes(
    direction: Direction,
    input_shape: Sequence[int],
    weight_shape: Sequence[int],
    output_shape: Sequence[int],
    *,
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    dtype: torch.dtype,
    channels_last: bool,
    card: Card,
    physics: Physics = PHYSICS,
) -> tuple[int, int, int]:
    """cuDNN's workspace of one convolution as (likely, low, high) bytes.

    `low` is an engine that reads the tensors in their memory format; `high` has every converted operand twice, with the largest split of the
    filter's gradient, or the Winograd transforms if no tensor cores are used. Shapes are (batch, channels, ...), the weight's (out, in / groups, ...).
    """
    element_bytes = dtype.itemsize
    weight_elements = math.prod(weight_shape)
    splits_at_most = weight_elements * 4 * physics.max_weight_splits if direction == "backward_weight" else 0
    accumulated = (
        weight_elements * 4 * physics.weight_splits if direction == "backward_weight" and element_bytes == 2 else 0
    )
    if not _uses_tensor_cores(dtype, card):
        square = len(weight_shape) == 4 and tuple(weight_shape[2:]) == (3, 3)
        winograd = square and set(stride) == {1} and set(dilation) == {1} and groups == 1
        transforms = _winograd_bytes(input_shape, weight_shape, output_shape, physics) if winograd else 0
        return 0, 0, max(transforms, splits_at_most)
    if channels_last:
        return accumulated, 0, splits_at_most
    converted = sum(_converted(shape, element_bytes, physics) for shape in (input_shape, weight_shape, output_shape))
    return converted + accumulated, 0, physics.conversions_at_most * converted + splits_at_most


def _padded(shape: Sequence[int]) -> list[int]:
    """One-dimensional convolutions run as two-dimensional ones of height 1."""
    return [*shape[:2], 1, *shape[2:]] if len(shape) == 3 else list(shape)


def _workspace(direction: Direction, arguments: Arguments, output_shape: Sequence[int], card: Card) -> int:
    tensor, weight = arguments["input"], arguments["weight"]
    if runs_natively(tensor, weight, arguments["stride"], arguments["dilation"], arguments["groups"]):
        return 0
    input_shape = tensor.shape
    if arguments["transposed"]:
        # The forward pass of a transposed convolution is the input gradient of the plain one, and is run as
        # that (`cudnn_convolution_transpose`).
        input_shape, output_shape = output_shape, input_shape
        swapped: dict[Direction, Direction] = {"forward": "backward_input", "backward_input": "forward"}
        direction = swapped.get(direction, direction)
    likely, low, high = convolution_workspace_bytes(
        direction,
        _padded(input_shape),
        _padded(weight.shape),
        _padded(output_shape),
        stride=arguments["stride"],
        dilation=arguments["dilation"],
        groups=arguments["groups"],
        dtype=tensor.dtype,
        channels_last=output_memory_format(tensor, weight) is not torch.contiguous_format,
        card=card,
    )
    return Uncertain.between(likely, low, high) if high or likely else 0


def _forward(arguments: Arguments, outputs: Outputs, card: Card) -> Iterator[int]:
    """`_convolution`: input and weight in the chosen layout, then the engine."""
    output = outputs[0]
    if output is None or not output.numel():
        return
    layout = output_memory_format(arguments["input"], arguments["weight"])
    yield from contiguous_copy(arguments["input"], layout)
    yield from contiguous_copy(arguments["weight"], layout)
    yield _workspace("forward", arguments, output.shape, card)


def _backward(arguments: Arguments, _outputs: Outputs, card: Card) -> Iterator[int]:
    """`convolution_backward`: the gradients of input and weight one after the other, then that of the bias as a sum."""
    grad: torch.Tensor = arguments["grad_output"]
    if not grad.numel():
        return
    layout = output_memory_format(arguments["input"], arguments["weight"])
    blocks = 0
    for operand in (arguments["input"], grad, arguments["weight"]):
        for copy in contiguous_copy(operand, layout):
            yield copy
            blocks += 1
    directions: tuple[Direction, Direction] = ("backward_input", "backward_weight")
    for wanted, direction in zip(arguments["output_mask"][:2], directions, strict=True):
        size = _workspace(direction, arguments, grad.shape, card) if wanted else 0
        if isinstance(size, Uncertain):
            blocks += 1
            yield size
            yield -blocks
    # The bias's gradient is torch's own sum over all dimensions but the channels, not cuDNN's.
    if arguments["output_mask"][2]:
        dims = [dim for dim in range(grad.dim()) if dim != 1]
        yield from reduction_buffers(
            grad, dims, accumulate_size(grad.dtype), card, input_vector=8 if grad.element_size() == 2 else 4
        )


_FAMILIES: tuple[tuple[Rule, Sequence[OpOverload]], ...] = (
    (_forward, (aten.convolution.default,)),
    (_backward, (aten.convolution_backward.default,)),
)

RULES: dict[OpOverload, Rule] = {operator: rule for rule, operators in _FAMILIES for operator in operators}
