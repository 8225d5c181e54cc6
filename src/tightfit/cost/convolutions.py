"""Seconds of convolutions from their sizes: implicit products of tiles, Winograd's, and depthwise ones, which the memory or the loads bind.

Forward, the gradient of the input and that of the weight are one pass each. A pass over groups of few channels computes on tiles of which most is padding,
or on the multiply-add units without tiles: the faster of both is taken, as cuDNN and torch do. Tensors that are not channels-last are converted
for tensor cores, which read that layout (docs/how-it-works/cuda-rules.md).
"""

import dataclasses

import numpy as np
import numpy.typing as npt

from tightfit.cost.products import ON_CORES, ON_TENSOR_CORES, Floats, Products, ProductTiles, product_seconds
from tightfit.cost.winograd import ConvolvedImages, Shares, fused_seconds, unfused_seconds

_OF_INPUT, _OF_WEIGHT = 1, 2

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
    images: Floats
    is_channels_last: npt.NDArray[np.bool_]
    gradient: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """What passes reach on a card: FLOP/s of tiles and the peak of the multiply-add units, bytes per second of streaming; `on_cores` where convolutions of 3 x 3 have
    algorithms of their own on the multiply-add units."""

    flops_per_second: float
    core_flops_per_second: float
    bytes_per_second: float
    num_multiprocessors: int
    tiling: ProductTiles
    element_bytes: int
    on_cores: Shares | None = None


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
    if reached.on_cores is not None:
        tiled = _on_cores(passes, reached, reached.on_cores, channels, num_bytes, tiled)
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


def _on_cores(
    passes: Passes, reached: Reached, shares: Shares, channels: Floats, num_bytes: Floats, otherwise: Floats
) -> Floats:
    """The faster of Winograd's algorithms and the implicit product where filters are 3 x 3, `otherwise` where they are not."""
    chosen = np.flatnonzero((passes.taps == _TAPS_OF_WINOGRAD) & (passes.stride == 1) & (passes.groups == 1))
    if not len(chosen):
        return otherwise
    images = np.maximum(passes.images[chosen], 1.0)
    ends = channels[chosen], passes.columns[chosen]
    sizes = ConvolvedImages(
        images=images,
        pixels=passes.rows[chosen] / images,
        # The gradient of the input is a convolution from the outputs to the inputs.
        channels=ends[passes.gradient == _OF_INPUT],
        outputs=ends[passes.gradient != _OF_INPUT],
    )
    rate, card = reached.flops_per_second, {"num_multiprocessors": reached.num_multiprocessors}
    is_of_weight = passes.gradient == _OF_WEIGHT
    part = Passes(
        *(getattr(passes, field.name)[chosen] for field in dataclasses.fields(passes)[:-1]), gradient=passes.gradient
    )
    implicit = dataclasses.replace(reached, flops_per_second=rate * shares.implicit)
    seconds = np.minimum(
        _tiled(part, implicit, channels[chosen], num_bytes[chosen], splits_depth=is_of_weight),
        unfused_seconds(
            sizes,
            is_of_weight=is_of_weight,
            flops_per_second=rate * shares.products,
            bytes_per_second=reached.bytes_per_second,
            **card,
        ),
    )
    if not is_of_weight:
        fused = fused_seconds(
            sizes, flops_per_second=rate * shares.fused, bytes_per_second=reached.bytes_per_second, **card
        )
        seconds = np.minimum(seconds, fused)
    result = otherwise.copy()
    result[chosen] = seconds
    return result


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
    return product_seconds(
        Products(batch=passes.groups, rows=rows, columns=columns, depth=depth, num_bytes=num_bytes),
        reached.tiling,
        num_multiprocessors=reached.num_multiprocessors,
        flops_per_second=reached.flops_per_second,
        bytes_per_second=reached.bytes_per_second,
        splits_depth=splits_depth,
    )
