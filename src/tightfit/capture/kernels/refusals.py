"""Names of dtypes and types of tensors in torch's words, and errors that read as the program would see them on a card."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from tightfit.errors.faults import for_torch

Check = Callable[[Sequence[Any], Mapping[str, Any]], None]

_NAMES = {
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.float32: "Float",
    torch.float64: "Double",
    torch.uint8: "Byte",
    torch.int8: "Char",
    torch.int16: "Short",
    torch.int32: "Int",
    torch.int64: "Long",
    torch.bool: "Bool",
    torch.complex64: "ComplexFloat",
    torch.complex128: "ComplexDouble",
}
# As C++ prints what a tensor's `dtype()` returns.
_OF_C = {"Half": "c10::Half", "BFloat16": "c10::BFloat16", "Long": "long int", "Int": "int", "Byte": "unsigned char"}


def name(dtype: torch.dtype) -> str:
    """The dtype in C++'s `ScalarType`: Float, Half, Long."""
    return _NAMES.get(dtype, str(dtype).removeprefix("torch.").capitalize())


def name_in_c(dtype: torch.dtype) -> str:
    """The dtype as C++ prints a tensor's `dtype()`: float, c10::Half, long int."""
    return _OF_C.get(name(dtype), name(dtype).lower())


def type_of(tensor: torch.Tensor) -> str:
    """The old name of a tensor's type: torch.cuda.FloatTensor."""
    return f"torch.{'cuda.' if is_on_card(tensor) else ''}{name(tensor.dtype)}Tensor"


def is_on_card(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on the virtual card, and not on the host."""
    return isinstance(tensor, FakeTensor) and tensor.fake_device.type == "cuda"


def refuse_unless(is_right: bool, words: str, kind: type[Exception] = RuntimeError) -> None:
    """Raises the error of a kernel that refuses its arguments.

    Raises:
        RuntimeError: of the `kind` given; not `is_right`.
    """
    if not is_right:
        raise for_torch(kind(words))
