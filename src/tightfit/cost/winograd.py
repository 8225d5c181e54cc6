"""Seconds of 3 x 3 convolutions of stride 1 on the multiply-add units: by Winograd's algorithm, or as an implicit product, whichever is faster.

Winograd's F(m x m, 3 x 3) computes m x m pixels from (m + 2) x (m + 2) multiplications for each pair of channels, 9 m^2 directly (Lavin and Gray 2015). cuDNN has it twice:

* fused, m = 2: a block of threads computes 8 x 16 pixels of one image by 32 channels and transforms what it needs by itself. Small images fill these
  blocks badly.
* in three kernels, m = 4: transforms to and from memory, and 36 products of channels between them. Its transforms move 9/4 of the input and of the output,
  its products do a quarter of the direct arithmetic.

The kernels do not reach the same part of a card's arithmetic as products of the same library. `SHARES` are the factors, one for each algorithm and generation, fitted
to one half of kernel_times (the rows of 0.6 ms and more whose name says the algorithm); the other half is in docs/accuracy/seconds.md.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from tightfit.cost.products import ON_CORES, Floats, Products, product_seconds


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """What kernels of convolutions reach of what matrix products reach on the same card, by algorithm."""

    implicit: float
    fused: float
    products: float


SHARES: Mapping[str, Shares] = {
    "sm_60": Shares(implicit=1.13, fused=1.15, products=0.91),
    "sm_70": Shares(implicit=1.08, fused=0.87, products=0.77),
    "sm_75": Shares(implicit=1.29, fused=0.95, products=1.08),
    "sm_80": Shares(implicit=0.87, fused=0.71, products=0.73),
}
# As on the newest card that was measured. It and later ones compute convolutions in TF32 unless the program says otherwise.
SHARES_ELSEWHERE = SHARES["sm_80"]

_TAPS = 9.0
_FUSED_PIXELS, _FUSED_PATCH, _FUSED_CHANNELS, _FUSED_MULTIPLICATIONS = 2, (4, 8), 32, 16
_DEPTH_STEP, _FUSED_FILL = 8, 8
_PIXELS, _NUM_PRODUCTS = 4, 36
_ITEM = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ConvolvedImages:
    """Convolutions that keep the size of `images` square images of `pixels` pixels, from `channels` to `outputs` channels; each of shape `(n,)`."""

    images: Floats
    pixels: Floats
    channels: Floats
    outputs: Floats


def fused_seconds(
    sizes: ConvolvedImages, *, num_multiprocessors: int, flops_per_second: float, bytes_per_second: float
) -> Floats:
    """Seconds of each convolution in one kernel of F(2 x 2, 3 x 3); `flops_per_second` is what the multiplications reach."""
    tiles = np.ceil(np.sqrt(sizes.pixels) / _FUSED_PIXELS)
    down, across = _FUSED_PATCH
    blocks = sizes.images * np.ceil(tiles / down) * np.ceil(tiles / across) * np.ceil(sizes.outputs / _FUSED_CHANNELS)
    depth = np.ceil(sizes.channels / _DEPTH_STEP) * _DEPTH_STEP + _FUSED_FILL
    of_block = 2.0 * _FUSED_MULTIPLICATIONS * down * across * _FUSED_CHANNELS * depth
    waves = np.ceil(blocks / num_multiprocessors)
    moved = sizes.images * sizes.pixels * (sizes.channels + sizes.outputs) + _TAPS * sizes.channels * sizes.outputs
    return np.maximum(waves * num_multiprocessors * of_block / flops_per_second, _ITEM * moved / bytes_per_second)


def unfused_seconds(
    sizes: ConvolvedImages,
    *,
    is_of_weight: bool,
    num_multiprocessors: int,
    flops_per_second: float,
    bytes_per_second: float,
) -> Floats:
    """Seconds of each convolution by F(4 x 4, 3 x 3) in kernels of its own for transforms and products."""
    tiles = sizes.images * np.ceil(np.sqrt(sizes.pixels) / _PIXELS) ** 2
    transformed = _NUM_PRODUCTS * (tiles * sizes.channels + tiles * sizes.outputs + sizes.channels * sizes.outputs)
    plain = sizes.images * sizes.pixels * (sizes.channels + sizes.outputs) + _TAPS * sizes.channels * sizes.outputs
    rows, columns, depth = (
        (sizes.channels, sizes.outputs, tiles) if is_of_weight else (tiles, sizes.outputs, sizes.channels)
    )
    products = product_seconds(
        Products(
            batch=np.full(len(tiles), float(_NUM_PRODUCTS)),
            rows=rows,
            columns=columns,
            depth=depth,
            num_bytes=_ITEM * transformed,
        ),
        ON_CORES,
        num_multiprocessors=num_multiprocessors,
        flops_per_second=flops_per_second,
        bytes_per_second=bytes_per_second,
        splits_depth=is_of_weight,
    )
    return products + _ITEM * (plain + transformed) / bytes_per_second
