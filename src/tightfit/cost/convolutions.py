"""Seconds of convolutions from their sizes: implicit products of tiles, Winograd's, and depthwise ones, which the memory or the loads bind.

Forward, the gradient of the input and that of the weight are one pass each. A pass over groups of few channels computes on tiles of which most is padding,
or on the multiply-add units without tiles: the faster of both is taken, as cuDNN and torch do. Tensors that are not channels-last are converted
for tensor cores, which read that layout (docs/how-it-works/cuda-rules.md).
"""

import dataclasses

import numpy as np
import numpy.typing as npt

from tightfit.cost.products import ON_CORES, ON_TENSOR_CORES, Floats, Products, ProductTiles, product_seconds

# Winograd F(2 x 2, 3 x 3) needs 16 instead of 36 multiplications per output tile (Lavin and Gray 2015); its transforms and the tiles that stick out take most of
# that back: over the direct count, this is the median of kernel_times on four cards.
WINOGRAD_GAIN = 1.2
_TAPS_OF_WINOGRAD = 9
# Numbers of one 128-bit load; tensor cores take channels in such groups.
_PADDED_CHANNELS = 8
# Depthwise kernels, by pass (forward, gradient of the input, gradient of the weight): of streaming, and of the multiply-add units. They load each
# operand of a multiplication anew, for which a multiprocessor has a quarter of the lanes, with the address arithmetic besides.
DEPTHWISE_STREAMING = (0.7, 0.7, 0.3)
DEPTHWISE_ARITHMETIC = (0.12, 0.12, 0.04)
# cuDNN has channels-last kernels on tensor cores for 32 groups of 4 to 64 channels (measured: steps of timm's ResNeXts; its release notes name such
# sizes). Other groups run on the multiply-add units, at this share (by pass) of their peak, and without splitting the depth.
_GROUPS_WITH_KERNELS = 32
_WIDTHS_WITH_KERNELS = (4, 8, 16, 32, 64)
GATHERED_SHARE = (1.0, 0.2, 0.2)
# Kernels for groups that are not channels-last take this much longer than dense ones.
GROUPED_FACTOR = (1.0, 1.8, 1.8)
# How often input and output are converted for tensor cores, by pass: the backward passes convert the gradient of the output once each.
CONVERSIONS = (0.7, 1.2, 1.2)


@dataclasses.dataclass(frozen=True, slots=True)
class Passes:
    """Passes of convolutions of one kind: the sizes of their forward passes as `tightfit.tape.Geometry` has them, each of shape `(n,)`. `gradient` is 0 for
    the forward pass, 1 for the gradient of the input, 2 for that of the weight."""

    groups: Floats
    rows: Floats
    columns: Floats
    depth: Floats
    taps: Floats
    stride: Floats
    is_channels_last: npt.NDArray[np.bool_]
    gradient: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """What passes reach on a card: FLOP/s of tiles and the peak of the multiply-add units, bytes per second of streaming."""

    flops_per_second: float
    core_flops_per_second: float
    bytes_per_second: float
    num_multiprocessors: int
    tiling: ProductTiles
    element_bytes: int


def pass_seconds(passes: Passes, reached: Reached) -> Floats:
    """Seconds of each pass without its fixed costs."""
    channels = passes.depth / np.maximum(passes.taps, 1.0)
    outputs = passes.groups * passes.rows * passes.columns
    # A convolution of stride s reads s^2 input pixels for each of its output; a filter of one tap only those it uses.
    pixels = passes.stride**2
    inputs = passes.groups * passes.rows * channels * pixels
    weights = passes.groups * passes.columns * passes.depth
    num_bytes = (inputs + outputs + weights) * reached.element_bytes
    tiled = _tiled(passes, reached, channels, num_bytes)
    if reached.tiling is ON_TENSOR_CORES:
        # Input and output are each read and written once more.
        converted = (
            CONVERSIONS[passes.gradient] * 2.0 * (inputs + outputs) * reached.element_bytes / reached.bytes_per_second
        )
        tiled = tiled + np.where(passes.is_channels_last, 0.0, converted)
    flops = 2.0 * outputs * passes.depth
    direct = np.maximum(
        num_bytes / (reached.bytes_per_second * DEPTHWISE_STREAMING[passes.gradient]),
        flops / (reached.core_flops_per_second * DEPTHWISE_ARITHMETIC[passes.gradient]),
    )
    has_kernels = (passes.groups == _GROUPS_WITH_KERNELS) & np.isin(channels, _WIDTHS_WITH_KERNELS)
    is_other = (passes.groups > 1) & ~has_kernels
    tiled = np.where(is_other, GROUPED_FACTOR[passes.gradient] * tiled, tiled)
    is_gathered = is_other & passes.is_channels_last
    if reached.tiling is ON_TENSOR_CORES and is_gathered.any():
        tiled = np.where(is_gathered, _gathered(passes, reached, channels, num_bytes), tiled)
    return np.where((channels == 1) & (passes.groups > 1), direct, tiled)


def _gathered(passes: Passes, reached: Reached, channels: Floats, num_bytes: Floats) -> Floats:
    slower = dataclasses.replace(
        reached, tiling=ON_CORES, flops_per_second=reached.core_flops_per_second * GATHERED_SHARE[passes.gradient]
    )
    return _tiled(passes, slower, channels, num_bytes, splits_depth=False)


def _tiled(
    passes: Passes, reached: Reached, channels: Floats, num_bytes: Floats, *, splits_depth: bool = True
) -> Floats:
    on_tensor_cores = reached.tiling is ON_TENSOR_CORES
    padded = np.ceil(channels / _PADDED_CHANNELS) * _PADDED_CHANNELS if on_tensor_cores else channels
    pixels = np.where(passes.taps > 1, passes.stride**2, 1.0)
    # The gradient of the input: input pixels by input channels, over output channels x taps, of which one in stride^2 meets a pixel.
    rows, columns, depth = (
        (passes.rows, passes.columns, padded * passes.taps),
        (passes.rows * pixels, padded, passes.columns * passes.taps / pixels),
        (passes.columns, padded * passes.taps, passes.rows),
    )[passes.gradient]
    gain = np.ones_like(depth)
    if not on_tensor_cores:
        is_winograd = (
            (passes.taps == _TAPS_OF_WINOGRAD) & (passes.stride == 1) & (passes.groups == 1) & (channels >= 16)
        )
        gain = np.where(is_winograd, WINOGRAD_GAIN, 1.0)
    return product_seconds(
        Products(batch=passes.groups, rows=rows, columns=columns, depth=depth, num_bytes=num_bytes),
        reached.tiling,
        num_multiprocessors=reached.num_multiprocessors,
        flops_per_second=reached.flops_per_second * gain,
        bytes_per_second=reached.bytes_per_second,
        splits_depth=splits_depth,
    )
