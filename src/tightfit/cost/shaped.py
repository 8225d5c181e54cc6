"""Seconds of the operators whose sizes a tape has: products, convolutions and attention (`tightfit.tape.Geometry`)."""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from tightfit.cost.classes import operator_class
from tightfit.cost.convolutions import Passes, Reached, pass_seconds
from tightfit.cost.efficiency import Efficiency
from tightfit.cost.products import ON_CORES, ON_TENSOR_CORES, Floats, Products, ProductTiles, product_seconds
from tightfit.cost.winograd import SHARES, SHARES_ELSEWHERE
from tightfit.devices.calibration import OperatorClass
from tightfit.devices.device import Device, DType
from tightfit.tape import Tape

_OF_INPUT, _OF_WEIGHT = 1, 2
# Of a row of the geometry: batch, rows, columns and depth.
_NUM_SIZES = 4
_ELEMENT_BYTES = {"float64": 8, "float16": 2, "bfloat16": 2, "float8": 1, "int8": 1}
# Queries and keys of a tile of the fused attention kernels (`tightfit.capture.dispatch.flops`).
_QUERIES, _KEYS = 128, 64
_ALIGNED, UNALIGNED_SHARE = 8, 0.5


def shaped_seconds(tape: Tape, device: Device, efficiency: Efficiency, arithmetic: npt.NDArray[np.str_]) -> Floats:
    """Seconds of each row of `tape.geometry` without the fixed costs of a kernel, shape `(len(tape.geometry),)`.

    `arithmetic` is the `DType` that each row computes in.
    """
    geometry = tape.geometry
    seconds = np.zeros(len(geometry))
    if not len(geometry):
        return seconds
    operator = geometry.operator
    names, name_of = np.unique(tape.operators.name[operator], return_inverse=True)
    kinds = np.array([operator_class(tape.strings[name]) for name in names])[name_of]
    num_bytes = tape.operators.bytes_read[operator] + tape.operators.bytes_written[operator]
    columns = [column.astype(np.int64) for column in geometry.columns().values()][1:]
    # A model repeats few sizes many times, in its blocks and in its steps.
    sizes = np.stack([*columns, num_bytes, tape.operators.flops[operator].astype(np.int64)], axis=1)
    # Without a row, as that of an expert that no token goes to, nothing is computed.
    is_some = (sizes[:, :_NUM_SIZES] > 0).all(axis=1)
    for kind, dtype in {*zip(kinds.tolist(), arithmetic.tolist(), strict=True)}:
        chosen = np.flatnonzero((kinds == kind) & (arithmetic == dtype) & is_some)
        if not len(chosen):
            continue
        distinct, place = np.unique(sizes[chosen], axis=0, return_inverse=True)
        seconds[chosen] = _SECONDS_OF[kind](distinct.T.astype(np.float64), device, efficiency, dtype)[place.reshape(-1)]
    return seconds


def with_aligned_products(tape: Tape) -> Tape:
    """The tape with the dimensions of its products made multiples of eight along which memory runs: in place of 50,257 columns 50,264. Batched ones stay,
    whose sizes are as a rule the lengths of sequences."""
    geometry = tape.geometry
    names = tape.operators.name[geometry.operator]
    is_product = np.array([operator_class(text) == "matmul" for text in tape.strings], dtype=bool)[names]
    is_padded = is_product & (geometry.batch == 1) & (geometry.num_columns > 1)
    of_weight = geometry.gradients == _OF_WEIGHT
    aligned = {
        "num_columns": (geometry.num_columns, is_padded),
        "num_rows": (geometry.num_rows, is_padded & of_weight),
        "depth": (geometry.depth, is_padded & ~of_weight),
    }
    columns = {
        name: np.where(chosen, -(-sizes // _ALIGNED) * _ALIGNED, sizes) for name, (sizes, chosen) in aligned.items()
    }
    return dataclasses.replace(tape, geometry=dataclasses.replace(geometry, **columns))


def tiling_of(device: Device, dtype: DType) -> ProductTiles:
    """How kernels tile that compute in `dtype`: on tensor cores where the card has units of their own for it."""
    faster = device.flops_per_second(dtype) > device.flops_per_second("float32")
    return ON_TENSOR_CORES if faster and dtype not in ("float32", "float64") else ON_CORES


def _products(sizes: Floats, device: Device, efficiency: Efficiency, dtype: DType) -> Floats:
    batch, rows, columns, depth, _, _, gradients, *_, num_bytes, _ = sizes
    tiling = tiling_of(device, dtype)
    rate = device.flops_per_second(dtype) * efficiency.of_tiles["matmul", dtype]
    if tiling is ON_TENSOR_CORES:
        # Loads of 128 bits need rows that begin at such addresses; kernels for other sizes load number by number. NVIDIA's guide (Matrix Multiplication Background)
        # asks it of the dimensions alone along which memory runs: in the gradient of a weight that is not the batch.
        along = np.where(gradients == _OF_WEIGHT, rows, depth)
        is_aligned = (columns % _ALIGNED == 0) & (along % _ALIGNED == 0)
        rate = np.where(is_aligned | (columns == 1), rate, UNALIGNED_SHARE * rate)
    return product_seconds(
        Products(batch=batch, rows=rows, columns=columns, depth=depth, num_bytes=num_bytes),
        tiling,
        num_multiprocessors=device.num_multiprocessors,
        flops_per_second=rate,
        bytes_per_second=device.dram_bytes_per_second * efficiency.of_bandwidth["matmul"],
    )


def _convolutions(sizes: Floats, device: Device, efficiency: Efficiency, dtype: DType) -> Floats:
    groups, rows, columns, depth, taps, stride, gradients, is_last, images, *_ = sizes
    tiling = tiling_of(device, dtype)
    # A calibration measures whole convolutions, Winograd's among them.
    has_shares = tiling is ON_CORES and dtype == "float32" and dtype not in efficiency.measured_convolutions
    reached = Reached(
        flops_per_second=device.flops_per_second(dtype) * efficiency.of_tiles["convolution", dtype],
        core_flops_per_second=device.flops_per_second("float32"),
        bytes_per_second=device.dram_bytes_per_second * efficiency.of_bandwidth["convolution"],
        num_multiprocessors=device.num_multiprocessors,
        tiling=tiling,
        element_bytes=_ELEMENT_BYTES.get(dtype, 4),
        on_cores=SHARES.get(device.isa, SHARES_ELSEWHERE) if has_shares else None,
    )
    total = np.zeros(sizes.shape[1])
    bits = gradients.astype(np.int64)
    for gradient, chosen in (
        (0, bits == 0),
        (_OF_INPUT, (bits & _OF_INPUT) > 0),
        (_OF_WEIGHT, (bits & _OF_WEIGHT) > 0),
    ):
        if chosen.any():
            part = (column[chosen] for column in (groups, rows, columns, depth, taps, stride, images))
            passes = Passes(*part, is_channels_last=is_last[chosen] > 0, gradient=gradient)
            total[chosen] += pass_seconds(passes, reached)
    return total


def _attention(sizes: Floats, device: Device, efficiency: Efficiency, dtype: DType) -> Floats:
    heads, queries, keys, *_, num_bytes, flops = sizes
    blocks = np.ceil(queries / _QUERIES)
    # Of a tile that the sequence does not fill the rest is computed too, and the last wave of blocks does not fill the card.
    padded = blocks * _QUERIES / queries * np.ceil(keys / _KEYS) * _KEYS / keys
    waves = heads * blocks / device.num_multiprocessors
    padded = padded * np.ceil(waves) / waves
    rate = device.flops_per_second(dtype) * efficiency.of_tiles["attention", dtype]
    return np.maximum(
        flops * padded / rate, num_bytes / (device.dram_bytes_per_second * efficiency.of_bandwidth["attention"])
    )


_SECONDS_OF: Mapping[OperatorClass, Callable[[Floats, Device, Efficiency, DType], Floats]] = {
    "matmul": _products,
    "convolution": _convolutions,
    "attention": _attention,
}
