"""The legacy tensor types, such as `torch.cuda.FloatTensor`: constructors, conversion targets, and types for `isinstance`."""

from typing import Any

import torch

from tightfit.capture.replace import replace
from tightfit.errors.faults import hands_over


class _LegacyType(type):
    """The type of `torch.cuda.FloatTensor`: a device and a dtype under one name."""

    dtype: torch.dtype

    @hands_over
    def __call__(cls, *args: Any, **_kwargs: Any) -> torch.Tensor:
        if args and isinstance(args[0], int):
            return torch.empty(args, dtype=cls.dtype, device="cuda")
        if args and isinstance(args[0], torch.Size):
            return torch.empty(args[0], dtype=cls.dtype, device="cuda")
        return torch.tensor(args[0] if args else [], dtype=cls.dtype, device="cuda")

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Tensor) and instance.is_cuda and instance.dtype == cls.dtype


_DTYPES = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "LongTensor": torch.int64,
    "IntTensor": torch.int32,
    "ShortTensor": torch.int16,
    "CharTensor": torch.int8,
    "ByteTensor": torch.uint8,
    "BoolTensor": torch.bool,
}


def install() -> None:
    """Replaces torch's types."""
    types = {name: _LegacyType(name, (), {"dtype": dtype}) for name, dtype in _DTYPES.items()}
    for name, kind in types.items():
        setattr(torch.cuda, name, kind)
    convert = torch.Tensor.type

    @hands_over
    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        # Tensor.type resolves such names in C++ only for types that the build knows; a CPU build knows no CUDA
        # ones.
        if isinstance(dtype, str) and dtype.startswith("torch.cuda."):
            dtype = types[dtype.removeprefix("torch.cuda.")]
        if isinstance(dtype, _LegacyType):
            return self.to("cuda", dtype.dtype)
        return convert(self) if dtype is None else convert(self, dtype, *args, **kwargs)

    replace(torch.Tensor, type=type_)
