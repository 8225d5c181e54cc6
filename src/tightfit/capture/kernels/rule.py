"""Scratch rules: their interface, and arithmetic that they share.

A rule yields a CUDA kernel's requests to the caching allocator, in order: `n` allocates n bytes, `-k` frees the k-th block that the rule
allocated (counting from one). Blocks that remain are freed when the operator returns. Outputs are taken to be allocated before.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch._ops import OpOverload

from tightfit.capture.kernels.architecture import Card
from tightfit.devices.cublas_workspaces import torch_version

# The operator was one of MPS alone before, and `F.rms_norm` composed of smaller ones on a card.
HAS_RMS_NORM = torch_version(torch.__version__) >= (2, 9)


class Uncertain(int):
    """A likely number of bytes with its range; the likely number may be 0."""

    low_bytes: int
    high_bytes: int

    @classmethod
    def between(cls, likely_bytes: int, low_bytes: int, high_bytes: int) -> Self:
        """`likely_bytes`, for certain at least `low_bytes` and at most `high_bytes`."""
        value = cls(likely_bytes)
        value.low_bytes, value.high_bytes = min(low_bytes, likely_bytes), max(high_bytes, likely_bytes)
        return value


Arguments = Mapping[str, Any]
Outputs = Sequence[torch.Tensor | None]
Rule = Callable[[Arguments, Outputs, Card], Iterator[int]]


def ceil_div(numerator: int, denominator: int) -> int:
    """The quotient, rounded up."""
    return -(-numerator // denominator)


def round_up(value: int, multiple: int) -> int:
    """The next multiple."""
    return ceil_div(value, multiple) * multiple


def last_power_of_two(value: int) -> int:
    """The largest power of two that is not above `value`, and 1 for values below 1."""
    return 1 << (max(value, 1).bit_length() - 1)


def num_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements, laid out densely."""
    return tensor.numel() * tensor.element_size()


def accumulate_size(dtype: torch.dtype) -> int:
    """Bytes of the type a CUDA kernel accumulates in (`acc_type<T, true>`, aten/src/ATen/AccumulateType.h)."""
    if dtype in (torch.float16, torch.bfloat16):
        return 4
    if dtype.is_floating_point or dtype.is_complex:
        return max(4, dtype.itemsize)
    # Integers and booleans accumulate in int64.
    return 8


def contiguous_copy(
    tensor: torch.Tensor, memory_format: torch.memory_format = torch.contiguous_format
) -> Iterator[int]:
    """The copy that `tensor.contiguous(memory_format)` makes inside a kernel; none if the tensor already has that memory format."""
    if not tensor.is_contiguous(memory_format=memory_format) and tensor.numel():
        yield num_bytes(tensor)


def bind(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by the names of the operator's schema, defaults included."""
    bound: dict[str, Any] = {}
    for position, argument in enumerate(operator._schema.arguments):
        if position < len(args):
            bound[argument.name] = args[position]
        elif argument.name in kwargs:
            bound[argument.name] = kwargs[argument.name]
        else:
            bound[argument.name] = argument.default_value
    return bound
