"""Scratch memory of normalisation layers: partial sums of the gradients of weight and bias, and staging buffers of batch norm.

On a card batch norm runs as `cudnn_batch_norm` for float32 and for float16 with float32 weights, and as `native_batch_norm` otherwise. Both
save the input, the mean and the inverse deviation, so a capture may keep `native_batch_norm`; cuDNN's reserve is empty outside its
persistent channels-last mode and small within it.
"""

from collections.abc import Iterator, Sequence

import torch
from torch._ops import OpOverload

from tightfit.capture.kernels.architecture import Card
from tightfit.capture.kernels.rule import (
    HAS_RMS_NORM,
    Arguments,
    Outputs,
    Rule,
    accumulate_size,
    ceil_div,
    last_power_of_two,
    num_bytes,
)

aten = torch.ops.aten


def _layer_norm_backward(arguments: Arguments, outputs: Outputs, card: Card) -> Iterator[int]:
    """`LaunchGammaBetaBackwardCUDAKernel` (layer_norm_kernel.cu): rows far more than columns are summed in two passes."""
    tensor: torch.Tensor = arguments["input"]
    weight: torch.Tensor | None = arguments["weight"]
    columns = torch.Size(arguments["normalized_shape"]).numel()
    rows = tensor.numel() // max(columns, 1)
    for operand in (arguments["grad_out"], tensor):
        if not operand.is_contiguous():
            yield num_bytes(operand)
    # Up to 65,536 rows, or with enough columns to fill half of the card, one kernel sums each column alone.
    if weight is None or rows <= 64 * 1024 or columns // 32 >= card.num_multiprocessors // 2:
        return
    blocks = min(64 * 1024 // 2 // ceil_div(columns, 32), ceil_div(rows, 32))
    for output in outputs[1:]:
        if output is not None:
            yield blocks * columns * weight.element_size()


def _layer_norm(arguments: Arguments, _outputs: Outputs, _card: Card) -> Iterator[int]:
    """`layer_norm_cuda` makes its input contiguous."""
    tensor: torch.Tensor = arguments["input"]
    if not tensor.is_contiguous():
        yield num_bytes(tensor)


def _group_norm_backward(arguments: Arguments, outputs: Outputs, _card: Card) -> Iterator[int]:
    """`GroupNormBackwardKernelImplInternal` (group_norm_kernel.cu): sums per sample and channel, factors per channel and group."""
    tensor: torch.Tensor = arguments["input"]
    samples, channels, groups = arguments["N"], arguments["C"], arguments["group"]
    size = accumulate_size(tensor.dtype)
    if not tensor.is_contiguous():
        yield num_bytes(tensor)
    if not arguments["grad_out"].is_contiguous():
        yield num_bytes(arguments["grad_out"])
    yield samples * channels * size
    yield samples * channels * size
    # The factors of the input's gradient; without one only the sums are taken.
    if outputs[0] is not None:
        yield samples * channels * size
        yield samples * groups * size
        yield samples * groups * size


def _group_norm(arguments: Arguments, _outputs: Outputs, _card: Card) -> Iterator[int]:
    """`GroupNormKernelImplInternal`: a scale and a shift per sample and channel."""
    tensor: torch.Tensor = arguments["input"]
    if not tensor.is_contiguous():
        yield num_bytes(tensor)
    for _ in range(2):
        yield arguments["N"] * arguments["C"] * accumulate_size(tensor.dtype)


def channels_last_staging_bytes(tensor: torch.Tensor, values_per_channel: int) -> int:
    """The staging buffer of a channels-last batch norm, in bytes (`flexible_launch_configs`, Normalization.cuh).

    `values_per_channel` is 4 for the statistics (mean, deviation, count) and 2 for the gradients.
    """
    channels = tensor.shape[1]
    reduction = tensor.numel() // channels
    block_x = min(last_power_of_two(channels), 32)
    block_y = min(last_power_of_two(ceil_div(reduction, 16)), 512 // block_x)
    grid_y = min(ceil_div(reduction, block_y * 16), 128)
    # Below 8 blocks along the rows they are not split, and need no staging (`flexible_launch_configs` with
    # `coop_flag`).
    return values_per_channel * channels * grid_y * 4 if grid_y >= 8 else 0


def _is_channels_last(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


def _batch_norm(arguments: Arguments, _outputs: Outputs, _card: Card) -> Iterator[int]:
    tensor: torch.Tensor = arguments["input"]
    if arguments["training"] and _is_channels_last(tensor):
        yield channels_last_staging_bytes(tensor, 4)


def _batch_norm_backward(arguments: Arguments, _outputs: Outputs, _card: Card) -> Iterator[int]:
    """The gradient is brought to the input's layout; then sums of dy and of dy * (x - mean) per channel."""
    tensor: torch.Tensor = arguments["input"]
    # cuDNN's schema and torch's own differ in the name.
    grad: torch.Tensor = arguments["grad_output" if "grad_output" in arguments else "grad_out"]
    if grad.stride() != tensor.stride():
        yield num_bytes(grad)
    yield tensor.shape[1] * 4
    yield tensor.shape[1] * 4
    if _is_channels_last(tensor):
        yield channels_last_staging_bytes(tensor, 2)


_FAMILIES: tuple[tuple[Rule, Sequence[OpOverload]], ...] = (
    (_layer_norm, (aten.native_layer_norm.default,)),
    (_layer_norm_backward, (aten.native_layer_norm_backward.default,)),
    (_group_norm, (aten.native_group_norm.default,)),
    (_group_norm_backward, (aten.native_group_norm_backward.default,)),
    (
        _batch_norm,
        (aten.native_batch_norm.default, aten._native_batch_norm_legit.default, aten.cudnn_batch_norm.default),
    ),
    (_batch_norm_backward, (aten.native_batch_norm_backward.default, aten.cudnn_batch_norm_backward.default)),
)

RULES: dict[OpOverload, Rule] = {operator: rule for rule, operators in _FAMILIES for operator in operators}
if HAS_RMS_NORM:
    RULES |= {aten._fused_rms_norm.default: _layer_norm, aten._fused_rms_norm_backward.default: _layer_norm_backward}
