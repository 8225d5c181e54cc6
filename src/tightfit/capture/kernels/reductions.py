"""Scratch memory of reductions: large ones are split over thread blocks, which combine their results in global memory.

Restates `setReduceConfig` and `gpu_reduce_kernel` of aten/src/ATen/native/cuda/Reduce.cuh (the header is part of every torch wheel): the block
shape, the split, and from them the buffer of partial results and the semaphores. The dimension order is that of TensorIterator.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch._ops import OpOverload

from tightfit.capture.kernels.architecture import Card
from tightfit.capture.kernels.rule import (
    Arguments,
    Outputs,
    Rule,
    accumulate_size,
    ceil_div,
    last_power_of_two,
    num_bytes,
)

aten = torch.ops.aten

_MAX_THREADS = 512
_MIN_VALUES_PER_THREAD = 16
_MAX_VALUES_PER_THREAD = 256


def _iteration_order(shape: Sequence[int], strides: Sequence[int], reduced: set[int]) -> list[tuple[int, int, int]]:
    """Dimensions in TensorIterator's order: (size, output stride, input stride), fastest first, reduced ones in front, merged."""
    kept = [size for dim, size in enumerate(shape) if dim not in reduced]
    output_strides = []
    position = 0
    for dim in range(len(shape)):
        if dim in reduced:
            output_strides.append(0)
        else:
            output_strides.append(math.prod(kept[position + 1 :]))
            position += 1

    # `TensorIteratorBase::reorder_dimensions` (aten/src/ATen/TensorIterator.cpp): an insertion sort whose
    # comparison may be undecided (0), in which case the next operand's strides decide. Restated step by step,
    # since a comparison that is no total order gives another result with another sort.
    def before(first: int, second: int) -> int:
        if (output_strides[first] == 0) != (output_strides[second] == 0):
            return 1 if output_strides[second] == 0 else -1
        for of in (output_strides, strides):
            if of[first] == 0 or of[second] == 0 or of[first] == of[second]:
                if of[first] == of[second] != 0 and shape[first] > shape[second]:
                    return 1
                continue
            return -1 if of[first] < of[second] else 1
        return 0

    order = list(reversed(range(len(shape))))
    for i in range(1, len(order)):
        moving = i
        for j in range(i - 1, -1, -1):
            comparison = before(order[j], order[moving])
            if comparison > 0:
                order[j], order[moving] = order[moving], order[j]
                moving = j
            elif comparison < 0:
                break
    # `coalesce_dimensions`: neighbours that can be walked as one dimension are one.
    merged: list[tuple[int, int, int]] = []
    for dim in order:
        size, output_stride, input_stride = shape[dim], output_strides[dim], strides[dim]
        if merged:
            last_size, last_output, last_input = merged[-1]
            joins = last_output * last_size == output_stride and last_input * last_size == input_stride
            if last_size == 1 or size == 1 or joins:
                keep_new = last_size == 1
                merged[-1] = (
                    last_size * size,
                    output_stride if keep_new else last_output,
                    input_stride if keep_new else last_input,
                )
                continue
        merged.append((size, output_stride, input_stride))
    return merged


def _output_vector(sizes: int, others: Sequence[int], offset: int) -> int:
    vector = 4
    for value in (offset, sizes, *others):
        while value % vector:
            vector //= 2
    return vector


def reduction_buffers(
    tensor: torch.Tensor, dims: Sequence[int], accumulator_bytes: int, card: Card, *, input_vector: int = 4
) -> tuple[int, int]:
    """The partial results and the semaphores of one reduction, in bytes; (0, 0) where thread blocks need not combine.

    `dims` are the reduced dimensions (empty: all), `accumulator_bytes` the size of the kernel's `arg_t`, `input_vector` its vector width along
    a contiguous reduction. Source: Reduce.cuh, `setReduceConfig`, `global_memory_size`, `semaphore_size`.
    """
    if tensor.numel() == 0:
        return 0, 0
    # A number without dimensions has dimension 0 all the same, by torch's rules.
    reduced = {dim % tensor.dim() for dim in dims} if dims and tensor.dim() else set(range(tensor.dim()))
    order = _iteration_order(tensor.shape, tensor.stride(), reduced)
    num_reduced = sum(1 for _, output_stride, _ in order if output_stride == 0)
    num_inputs = math.prod(tensor.shape[dim] for dim in reduced)
    num_outputs = tensor.numel() // num_inputs
    # `reduction_on_fastest_striding_dimension`; `wide` and `tall` are its `dim0` and `dim1`.
    along = not order or num_reduced == len(order) or order[0][2] < order[num_reduced][2]
    fastest = (order[0][2] if along else order[num_reduced][2]) if order else 1
    wide, tall = (num_inputs, num_outputs) if along else (num_outputs, num_inputs)
    vector = 1
    # The header's strides are in bytes; here they are in elements.
    if fastest == 1:
        if along and wide >= 128 and num_reduced == 1:
            wide //= input_vector
        elif not along:
            others = [stride for dim, (_, _, stride) in enumerate(order) if dim != num_reduced]
            vector = _output_vector(order[num_reduced][0], others, int(tensor.storage_offset()))
            wide //= vector
    # `mnt_wrapper`: 256 threads for complex<double>, whose registers are too many for 512.
    max_threads = (_MAX_THREADS // 2 if tensor.dtype == torch.complex128 else _MAX_THREADS) // vector
    # `set_block_dimension`: a row of at most one warp first, then as high as the block allows, then wider if
    # height is left over.
    wide_power = last_power_of_two(wide) if wide < max_threads else max_threads
    tall_power = last_power_of_two(tall) if tall < max_threads else max_threads
    height = min(tall_power, max_threads // min(wide_power, 32))
    width = min(wide_power, max_threads // height)
    step_input, step_output = (width, 1) if along else (1, width)
    # `split_across_warps` is false: each warp has an output of its own, and thread blocks are never combined.
    if ceil_div(num_inputs, step_input) < min(height * 16, _MAX_VALUES_PER_THREAD):
        return 0, 0
    step_input *= height
    values_per_thread = ceil_div(num_inputs, step_input)
    # `target_grid_size`: as many blocks as can be resident at a time.
    target = card.num_multiprocessors * (card.num_threads_per_multiprocessor // (width * height))
    grid = ceil_div(num_outputs // vector, step_output)
    if values_per_thread < _MAX_VALUES_PER_THREAD or grid > target:
        return 0, 0
    # `ctas_per_output`, the smaller of the first two counts but no fewer than the third.
    splits = max(
        min(ceil_div(target, grid), ceil_div(values_per_thread, _MIN_VALUES_PER_THREAD)),
        ceil_div(values_per_thread, _MAX_VALUES_PER_THREAD),
    )
    if splits <= 1:
        return 0, 0
    # `global_memory_size`: without a reduction inside of the block each thread column leaves a value of its
    # own.
    return accumulator_bytes * num_outputs * splits * (1 if along else width * vector), 4 * grid


def _dims(arguments: Arguments) -> list[int]:
    dims = arguments.get("dim")
    if dims is None:
        return []
    return [dims] if isinstance(dims, int) else list(dims)


def _sum(arguments: Arguments, outputs: Outputs, card: Card) -> Iterator[int]:
    """sum, mean, prod, norms: integers are first converted to the output's type (`make_reduction_from_out_ty`, ReduceOpsUtils.h)."""
    tensor, output = arguments["self"], outputs[0]
    # A half-precision input with a float32 output is read as it is; no converted copy is made
    # (`make_reduction`, ReduceOpsUtils.h).
    low_to_float = tensor.element_size() == 2 and output is not None and output.dtype == torch.float32
    if output is not None and output.dtype != tensor.dtype and not low_to_float and not tensor.is_complex():
        yield tensor.numel() * output.element_size()
        accumulator = accumulate_size(output.dtype)
    else:
        accumulator = accumulate_size(tensor.dtype)
    yield from reduction_buffers(
        tensor, _dims(arguments), accumulator, card, input_vector=8 if tensor.element_size() == 2 else 4
    )


def _with(accumulator: Callable[[torch.Tensor], int]) -> Rule:
    def rule(arguments: Arguments, _outputs: Outputs, card: Card) -> Iterator[int]:
        tensor = arguments["self"]
        yield from reduction_buffers(tensor, _dims(arguments), accumulator(tensor), card)

    return rule


def _logsumexp(arguments: Arguments, outputs: Outputs, card: Card) -> Iterator[int]:
    """`logsumexp_out_impl` (ReduceOps.cpp): the maxima, then exp(self - maxima) in full, then a sum."""
    tensor = arguments["self"]
    if outputs[0] is not None:
        yield num_bytes(outputs[0])
    yield num_bytes(tensor)
    yield from reduction_buffers(tensor, _dims(arguments), accumulate_size(tensor.dtype), card)


def _foreach_norm(arguments: Arguments, _outputs: Outputs, _card: Card) -> Iterator[int]:
    """One partial result per tensor and per chunk of the largest tensor (ForeachReduceOp.cu, kChunkSize 65536)."""
    tensors = arguments["self"]
    chunks = max((ceil_div(tensor.numel(), 65536) for tensor in tensors), default=0)
    yield len(tensors) * chunks * max((accumulate_size(tensor.dtype) for tensor in tensors), default=4)


def _safe_softmax(arguments: Arguments, _outputs: Outputs, _card: Card) -> Iterator[int]:
    """`_safe_softmax` (attention.cpp): a mask of the -inf entries and one flag per row."""
    tensor = arguments["self"]
    yield tensor.numel()
    yield tensor.numel() // max(tensor.shape[arguments["dim"]], 1)


def _values(tensor: torch.Tensor) -> int:
    return accumulate_size(tensor.dtype) if tensor.dtype.is_floating_point else tensor.element_size()


def _pair(tensor: torch.Tensor) -> int:
    return 8 + max(8, tensor.element_size())  # pair<scalar, int64>, aligned to 8


def _welford(tensor: torch.Tensor) -> int:
    return 32 if tensor.dtype == torch.float64 else 16  # WelfordData: mean, m2, n (int32), nf


_FAMILIES: tuple[tuple[Rule, Sequence[OpOverload]], ...] = (
    (
        _sum,
        (
            aten.sum.default,
            aten.sum.dim_IntList,
            aten.mean.default,
            aten.mean.dim,
            aten.nansum.default,
            aten.prod.default,
            aten.prod.dim_int,
            aten.linalg_vector_norm.default,
            aten.norm.Scalar,
            aten.norm.ScalarOpt_dim,
        ),
    ),
    (_with(_values), (aten.amax.default, aten.amin.default, aten.max.default, aten.min.default)),
    (_with(lambda tensor: tensor.element_size()), (aten.any.default, aten.any.dim, aten.all.default, aten.all.dim)),
    (_with(_pair), (aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default)),
    (_with(_welford), (aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction)),
    (_logsumexp, (aten.logsumexp.default,)),
    (_foreach_norm, (aten._foreach_norm.Scalar,)),
    (_safe_softmax, (aten._safe_softmax.default,)),
)

RULES: dict[OpOverload, Rule] = {operator: rule for rule, operators in _FAMILIES for operator in operators}
