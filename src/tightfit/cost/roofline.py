"""Seconds of each operator of a tape on a GPU: the slower of its arithmetic and its memory traffic, plus the fixed cost of a kernel.

    seconds = max(flops / (peak x efficiency), bytes / (bandwidth x efficiency)) + launch [+ ramp]

The roofline of Williams, Waterman and Patterson (2009) with a measured efficiency per class of operator. Products, convolutions and attention whose sizes the
tape has are priced by their tiles instead (`tightfit.cost.shaped`). `ramp` is added to matrix products,
convolutions and attention: filling and draining the multiprocessors costs them a fixed time, which is how the efficiency of small ones falls
(half of it is lost where the product itself takes as long as the fixed costs). Caches that hold what the previous kernel wrote are not modelled. A lookup reads as many bytes as it writes, not the whole table. A row without FLOPs and bytes, or one that
only allocates, is no kernel and costs nothing. Copies to and from the host take what the link takes (`tightfit.cost.copies`), those to and from disk what that takes (`tightfit.cost.disks`); tapes from before these
were told apart have them as copies on the GPU.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from tightfit.cost.classes import (
    TENSOR_CORE_CLASSES,
    is_lookup,
    is_pointwise_of_two,
    is_scatter,
    only_writes,
    operator_class,
    passes_over,
    runs_kernel,
    sums_channels,
)
from tightfit.cost.copies import copy_costs
from tightfit.cost.disks import disk_costs
from tightfit.cost.efficiency import Efficiency, efficiency_of
from tightfit.cost.shaped import shaped_seconds
from tightfit.devices.calibration import Calibration, OperatorClass
from tightfit.devices.device import Device, DType
from tightfit.tape import CopyDirection, Tape

_ARITHMETIC: dict[str, DType] = {
    "float64": "float64",
    "complex128": "float64",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "int8": "int8",
    "uint8": "int8",
}

# A kernel that broadcasts or converts computes an address for each number (aten/src/ATen/native/cuda/CUDALoops.cuh).
_MIXED_FACTOR = 1.25
# Batch normalisation in training sums each channel in one block (aten/src/ATen/native/cuda/Normalization.cuh, and cuDNN's `bn_fw_tr_1C11` and `bn_bw_1C11`), which waits for
# its loads: on a multiprocessor of an H200 it moves 10.2 GB/s forward and 10.8 backward, in a residual net of 50 layers in half precision (7.4 to 11.2 with 64 channels in float32),
# where copies have 31. That holds cards up whose memory is fast for their multiprocessors.
_CHANNEL_SUM_BYTES_PER_SECOND = 10.4e9


def operator_seconds(
    tape: Tape,
    device: Device,
    calibration: Calibration | None = None,
    *,
    tf32_matmul: bool | None = None,
    tf32_convolution: bool | None = None,
) -> npt.NDArray[np.float64]:
    """Seconds of each operator, shape `(len(tape.operators),)`, float64.

    TF32 is by default as the program of the tape has set it (`torch.set_float32_matmul_precision`, `torch.backends.cudnn.allow_tf32`).
    """
    operators = tape.operators
    if not len(operators):
        return np.zeros(0)
    efficiency = efficiency_of(device, calibration)
    pairs, types, kind_of = _pairs(tape, tf32_matmul=tf32_matmul, tf32_convolution=tf32_convolution)
    if device.flops_per_second("tf32") <= device.flops_per_second("float32"):
        # A card that does not have TF32 computes in float32, whatever the program allows.
        types = list[DType]("float32" if dtype == "tf32" else dtype for dtype in types)
    rates = np.array(
        [_rates(device, efficiency, kind, arithmetic) for (kind, _), arithmetic in zip(pairs, types, strict=True)]
    )
    flops_per_second, bytes_per_second, fixed_seconds = rates[kind_of].T
    looks_up = _by_name(tape, is_lookup)
    num_bytes_read = np.where(looks_up, operators.bytes_written, operators.bytes_read)
    num_bytes = operators.bytes_written + np.where(_by_name(tape, only_writes), 0, num_bytes_read)
    # What is scattered is read and written once, with its indices; the target is among the bytes read and is the bytes written, as a whole.
    num_scattered_bytes = 2 * np.maximum(0, operators.bytes_read - operators.bytes_written)
    num_bytes = np.where(_by_name(tape, is_scatter), num_scattered_bytes, num_bytes)
    num_bytes = num_bytes * _by_name(tape, passes_over, np.float64)
    # Two tensors of one shape and type are twice as many bytes as the result, a number and a tensor as many, an expanded tensor fewer.
    is_mixed = (operators.bytes_read != operators.bytes_written) & (operators.bytes_read < 2 * operators.bytes_written)
    num_bytes = np.where(is_mixed & _by_name(tape, is_pointwise_of_two), _MIXED_FACTOR * num_bytes, num_bytes)
    bytes_per_second = np.minimum(bytes_per_second, _channel_sum_limits(tape, device))
    seconds = np.maximum(operators.flops / flops_per_second, num_bytes / bytes_per_second) + fixed_seconds
    seconds = np.where(is_kernel(tape), seconds, 0.0)
    if len(tape.geometry):
        row = tape.geometry.operator
        arithmetic = np.array(types)[kind_of][row]
        seconds[row] = shaped_seconds(tape, device, efficiency, arithmetic) + fixed_seconds[row]
    seconds[tape.copies.operator] = _copying(tape, device, calibration)
    # What they take depends on the node, which is not the GPU's (`tightfit.cost.traced_collectives`).
    seconds[tape.collectives.operator] = 0.0
    assert np.isfinite(seconds).all(), "an operator without a time"
    return seconds


def _channel_sum_limits(tape: Tape, device: Device) -> npt.NDArray[np.float64]:
    """Bytes per second that each operator's sums over channels let it reach; without limit for others, in evaluation, and on cards where it was not measured.

    A tape has one name for batch normalisation in training and in evaluation: a program without its backward pass is taken to evaluate.
    """
    sums = _by_name(tape, sums_channels)
    trains = any(sums_channels(name) and "backward" in name for name in tape.strings)
    if not trains or device.vendor != "nvidia":
        return np.full(len(sums), np.inf)
    return np.where(sums, _CHANNEL_SUM_BYTES_PER_SECOND * device.num_multiprocessors, np.inf)


def arithmetic_of_operators(
    tape: Tape, *, tf32_matmul: bool | None = None, tf32_convolution: bool | None = None
) -> npt.NDArray[np.str_]:
    """The `DType` that each operator computes in, shape `(len(tape.operators),)`."""
    if not len(tape.operators):
        return np.zeros(0, dtype="<U8")
    _, types, kind_of = _pairs(tape, tf32_matmul=tf32_matmul, tf32_convolution=tf32_convolution)
    return np.array(types)[kind_of]


def _pairs(
    tape: Tape, *, tf32_matmul: bool | None, tf32_convolution: bool | None
) -> tuple[list[tuple[OperatorClass, str]], list[DType], npt.NDArray[np.int64]]:
    """The distinct pairs of class and type of the operators, what each computes in, and the place of each operator among them."""
    operators, num_strings = tape.operators, len(tape.strings)
    # Rates are looked up once per pair of name and dtype: a tape has tens of thousands of operators of some hundred pairs.
    kinds, kind_of = np.unique(operators.name.astype(np.int64) * num_strings + operators.dtype, return_inverse=True)
    pairs = [
        (operator_class(tape.strings[name]), tape.strings[dtype])
        for name, dtype in zip(*divmod(kinds, num_strings), strict=True)
    ]
    of_products = tape.tf32_matmul if tf32_matmul is None else tf32_matmul
    of_convolutions = tape.tf32_convolution if tf32_convolution is None else tf32_convolution
    types = [
        arithmetic_type(kind, dtype, tf32_matmul=of_products, tf32_convolution=of_convolutions) for kind, dtype in pairs
    ]
    return pairs, types, kind_of


def _copying(tape: Tape, device: Device, calibration: Calibration | None) -> npt.NDArray[np.float64]:
    """Seconds of each copy between host and card, or between host and disk."""
    copies = tape.copies
    seconds = np.zeros(len(copies))
    for direction in (CopyDirection.TO_DISK, CopyDirection.FROM_DISK):
        chosen = copies.direction == direction
        fixed, rate = disk_costs(to_disk=direction == CopyDirection.TO_DISK, calibration=calibration)
        seconds[chosen] = fixed + copies.num_bytes[chosen] / rate
    for direction in (CopyDirection.TO_CARD, CopyDirection.TO_HOST):
        for is_pinned in (False, True):
            chosen = (copies.direction == direction) & (copies.is_pinned == is_pinned)
            to_card = direction == CopyDirection.TO_CARD
            fixed, rate = copy_costs(device, is_pinned=is_pinned, to_card=to_card, calibration=calibration)
            seconds[chosen] = fixed + copies.num_bytes[chosen] / rate
    return seconds


def is_kernel(tape: Tape) -> npt.NDArray[np.bool_]:
    """Which operators of `tape` launch a kernel or a copy: those that compute, read or write, except those that only allocate."""
    operators = tape.operators
    works = (operators.flops > 0) | (operators.bytes_read > 0) | (operators.bytes_written > 0)
    return works & _by_name(tape, runs_kernel)


def arithmetic_type(kind: OperatorClass, dtype: str, *, tf32_matmul: bool, tf32_convolution: bool) -> DType:
    """The arithmetic units that an operator of class `kind` on tensors of type `dtype` uses.

    Only matmuls, convolutions and attention use tensor cores; the rest computes in float32 whatever it stores (in float64 for doubles).
    """
    if kind not in TENSOR_CORE_CLASSES:
        # Elementwise kernels and reductions compute in at::opmath_type, which is float for half precision.
        return "float64" if _ARITHMETIC.get(dtype) == "float64" else "float32"
    if dtype.startswith("float8"):
        return "float8"
    if dtype in _ARITHMETIC:
        return _ARITHMETIC[dtype]
    # float32: cuBLAS and cuDNN have separate switches, and torch's defaults differ (matmul off, convolution on).
    return "tf32" if (tf32_convolution if kind == "convolution" else tf32_matmul) else "float32"


def _by_name(tape: Tape, of_name: Callable[[str], bool | float], dtype: type = np.bool_) -> npt.NDArray[Any]:
    """Applies `of_name` to the name of each operator, once per distinct name."""
    names, name_of = np.unique(tape.operators.name, return_inverse=True)
    return np.array([of_name(tape.strings[name]) for name in names], dtype=dtype)[name_of]


def kernel_seconds(
    device: Device, efficiency: Efficiency, kind: OperatorClass, arithmetic: DType, *, flops: float, num_bytes: int
) -> float:
    """Seconds of one kernel of class `kind` that computes on units for `arithmetic` and moves `num_bytes`."""
    flops_per_second, bytes_per_second, fixed_seconds = _rates(device, efficiency, kind, arithmetic)
    return max(flops / flops_per_second, num_bytes / bytes_per_second) + fixed_seconds


def _rates(
    device: Device, efficiency: Efficiency, kind: OperatorClass, arithmetic: DType
) -> tuple[float, float, float]:
    """FLOP/s, bytes/s and fixed seconds of operators of one class and type of arithmetic."""
    fixed = efficiency.launch_seconds + (efficiency.ramp_seconds if kind in TENSOR_CORE_CLASSES else 0.0)
    return (
        device.flops_per_second(arithmetic) * efficiency.of_flops[kind, arithmetic],
        device.dram_bytes_per_second * efficiency.of_bandwidth[kind],
        fixed,
    )
