"""The sizes of matrix products, convolutions and attention, from which their kernels' tiles follow (`tightfit.tape.Geometry`).

A convolution is noted as the product that its forward pass is (implicit GEMM, Chetlur et al. 2014, "cuDNN: Efficient Primitives for Deep
Learning", section 3): images x output pixels by output channels, over input channels x taps, one for each group.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from tightfit.capture.kernels.convolution import output_memory_format

Sizes = tuple[int, int, int, int, int, int, int, bool, int]
"""batch, rows, columns, depth, taps, stride, gradients, is_channels_last, images."""

_FORWARD, _OF_INPUT, _OF_WEIGHT = 0, 1, 2


def sizes_of(operator: OpOverload) -> Callable[..., Sizes | None] | None:
    """The function that reads the sizes from the arguments and results of a call; None for operators of other kinds."""
    # An underscore says no more than that an operator is not meant to be called by programs.
    base = operator._overloadpacket.__name__.removeprefix("_")
    if base in _PRODUCTS:
        return _PRODUCTS[base]
    if base == "convolution":
        return lambda args, out: _convolution(args[0], args[1], out, args[3], _FORWARD, is_transposed=args[6])
    if base == "convolution_backward":
        return _convolution_backward
    names = {argument.name for argument in operator._schema.arguments}
    if "attention" in base and {"query", "key"} <= names:
        return _attention(operator)
    return None


def _product_first(args: Sequence[Any], out: torch.Tensor) -> Sizes:
    return _product(args[0], args[1])


def _product_behind_bias(args: Sequence[Any], out: torch.Tensor) -> Sizes:
    return _product(args[1], args[2])


def _position(operator: OpOverload, name: str) -> int:
    return [argument.name for argument in operator._schema.arguments].index(name)


def _product(left: torch.Tensor, right: torch.Tensor) -> Sizes:
    rows, depth = left.shape[-2:]
    # The gradient of a weight sums over the batch, along which the memory of neither operand runs.
    is_of_weight = _runs_along_last(right) and not _runs_along_last(left)
    gradients = _OF_WEIGHT if is_of_weight else _FORWARD
    return (math.prod(left.shape[:-2]), rows, right.shape[-1], depth, 0, 1, gradients, False, 0)


def _runs_along_last(tensor: torch.Tensor) -> bool:
    return tensor.layout != torch.strided or tensor.stride(-1) == 1


def _grouped_product(args: Sequence[Any], out: torch.Tensor) -> Sizes:
    """As many products as there are groups, each with an equal share of the rows, columns or depth that they have between them."""
    left, right = args[:2]
    groups = next(tensor.shape[0] for tensor in (left, right, out) if tensor.dim() == 3)
    rows, depth, columns = left.shape[-2], left.shape[-1], right.shape[-1]
    if left.dim() == right.dim() == 2:
        depth = -(-depth // groups)
    elif left.dim() == 2:
        rows = -(-rows // groups)
    elif right.dim() == 2:
        columns = -(-columns // groups)
    return (groups, rows, columns, depth, 0, 1, _FORWARD, False, 0)


def _convolution(
    tensor: torch.Tensor,
    weight: torch.Tensor,
    output: torch.Tensor,
    stride: Sequence[int],
    gradients: int,
    *,
    is_transposed: bool,
) -> Sizes | None:
    if output.dim() < 3 or not weight.numel():
        return None
    taps = math.prod(weight.shape[2:])
    in_channels, out_channels = tensor.shape[1], output.shape[1]
    # A weight has (outputs, inputs of a group), that of a transposed convolution (inputs, outputs of a group), which meets each input pixel once.
    groups = out_channels // weight.shape[1] if is_transposed else in_channels // weight.shape[1]
    pixels = (tensor if is_transposed else output).shape
    rows = pixels[0] * math.prod(pixels[2:])
    is_last = output_memory_format(tensor, weight) is not torch.contiguous_format
    steps = 1 if is_transposed else max(stride)
    depth = in_channels // groups * taps
    return (groups, rows, out_channels // groups, depth, taps, steps, gradients, is_last, pixels[0])


def _convolution_backward(args: Sequence[Any], out: Any) -> Sizes | None:
    gradient, tensor, weight, _, stride = args[:5]
    has_input, has_weight = args[10][:2]
    gradients = _OF_INPUT * bool(has_input) + _OF_WEIGHT * bool(has_weight)
    return _convolution(tensor, weight, gradient, stride, gradients, is_transposed=args[7]) if gradients else None


def _attention(operator: OpOverload) -> Callable[..., Sizes | None]:
    query, key = (_position(operator, name) for name in ("query", "key"))
    # The composites have heads before tokens, the kernels below them after.
    heads_last = not operator._overloadpacket.__name__.startswith("_scaled_dot_product_")
    gradients = _OF_INPUT if "backward" in operator._overloadpacket.__name__ else _FORWARD

    def sizes(args: Sequence[Any], out: Any) -> Sizes | None:
        if args[query].dim() != 4:
            return None
        length, other = (args[at].shape[1 if heads_last else 2] for at in (query, key))
        heads = args[query].shape[2 if heads_last else 1]
        return (args[query].shape[0] * heads, length, other, args[query].shape[3], 0, 1, gradients, False, 0)

    return sizes


_PRODUCTS: dict[str, Callable[..., Sizes | None]] = {
    **dict.fromkeys(("mm", "bmm", "scaled_mm", "int_mm"), _product_first),
    **dict.fromkeys(("addmm", "baddbmm", "addmm_activation"), _product_behind_bias),
    **dict.fromkeys(("grouped_mm", "scaled_grouped_mm"), _grouped_product),
}
