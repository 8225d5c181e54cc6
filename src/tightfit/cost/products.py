"""Seconds of matrix products, convolutions and attention from their sizes: tiles of the result, in waves over the multiprocessors.

A kernel computes one tile of the result in each block of threads (NVIDIA, "Matrix Multiplication Background User's Guide": tile and wave quantisation). With
S multiprocessors and T tiles, `ceil(T / S)` of them are computed one after the other on the busiest multiprocessor, at a rate that grows with the tile:

    rate = peak of a multiprocessor x reached x i / (i + half),    i = rows x columns / (rows + columns)

`i` is how often each number loaded from shared memory is used, `half` the use at which loading takes as long as computing. Before the first and after the
last multiplication a block fills its pipeline and writes its tile: `fill` steps of depth. A kernel that has too few tiles may share out the depth and add up
(split-K). The library is taken to choose the fastest: it does so by benchmark (cuDNN) or by heuristics that come close (cuBLAS).

A convolution is a product for each group (`tightfit.tape.Geometry`), or, of 3 x 3 filters in float32 arithmetic, Winograd's (`tightfit.cost.winograd`).
"""

import dataclasses

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_ROWS_AND_COLUMNS = (
    (256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64), (128, 32), (32, 128), (64, 32), (32, 64), (32, 32),
)  # fmt: skip
# A part of the depth that is shorter does not pay for its partial sums.
_SHORTEST_PART = 128
_PARTIAL_BYTES = 8.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProductTiles:
    """How kernels of one type of arithmetic work: the `half` use and the `fill` of the module's docstring, the step of depth, and the bytes
    of a partial sum. Sources at the constants below."""

    half: float
    fill: float
    depth_step: int


# Multiply-add units: fitted to the linear layers of kernel_times on A100, V100, T4, P100, L4 and H100 (docs/log.md).
ON_CORES = ProductTiles(half=6.0, fill=20.0, depth_step=8)
# Tensor cores: pipelines of three to four steps of 32 (CUTLASS), which blocks that share a multiprocessor hide in part.
ON_TENSOR_CORES = ProductTiles(half=8.0, fill=24.0, depth_step=16)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Products:
    """Sizes of products, each of shape `(n,)`: `batch` of `rows` x `depth` by `depth` x `columns`; `num_bytes` move to and from memory."""

    batch: Floats
    rows: Floats
    columns: Floats
    depth: Floats
    num_bytes: Floats

    @property
    def num_results(self) -> Floats:
        """Numbers in the results."""
        return self.batch * self.rows * self.columns


def product_seconds(
    products: Products,
    tiling: ProductTiles,
    *,
    num_multiprocessors: int,
    flops_per_second: Floats | float,
    bytes_per_second: float,
    splits_depth: bool = True,
) -> Floats:
    """Seconds of each product without its fixed costs; `flops_per_second` is what the best shapes reach."""
    best = np.full(len(products.rows), np.inf)
    streaming = products.num_bytes / bytes_per_second
    largest = _uses(*_ROWS_AND_COLUMNS[2])
    for rows, columns in _ROWS_AND_COLUMNS:
        uses = _uses(rows, columns)
        share = min(1.0, uses / (uses + tiling.half) / (largest / (largest + tiling.half)))
        tiles = products.batch * np.ceil(products.rows / rows) * np.ceil(products.columns / columns)
        per_step = 2.0 * rows * columns * num_multiprocessors / (flops_per_second * share)
        # The whole depth in each tile, or as many parts of it as fill one wave, or two.
        for waves in (0, 1, 2) if splits_depth else (0,):
            parts = np.maximum(1.0, np.floor(waves * num_multiprocessors / tiles))
            parts = np.minimum(parts, np.maximum(1.0, np.floor(products.depth / _SHORTEST_PART)))
            steps = np.ceil(products.depth / parts / tiling.depth_step) * tiling.depth_step + tiling.fill
            computing = np.ceil(tiles * parts / num_multiprocessors) * steps * per_step
            # Partial sums are float32, written once and read once.
            adding = np.where(parts > 1, _PARTIAL_BYTES * parts * products.num_results, 0.0) / bytes_per_second
            np.minimum(best, np.maximum(computing, streaming) + adding, out=best)
    return best


def _uses(rows: int, columns: int) -> float:
    return rows * columns / (rows + columns)
