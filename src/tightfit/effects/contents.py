"""Reads the contents of tensors at the host, which show writes that change no version: through `.data`, numpy, or an address.

No operator of torch runs for it, which a mode of the program's would see. Tensors on a card are not read: one would wait for it.
"""

import ctypes
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

SMALL_BYTES = 1 << 14
"""Up to which size a content is kept as it is."""


def content_of(tensor: torch.Tensor) -> bytes | int | None:
    """The bytes of a small tensor at the host, and the sum of the bits of a larger one; None for what cannot be read at once.

    The sum is over numbers of 64 bits: it is made at the speed of memory, and is blind to numbers that change places.
    """
    is_read = (
        type(tensor) in (torch.Tensor, torch.nn.Buffer, torch.nn.Parameter)
        and not isinstance(tensor, FakeTensor)
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
    )
    # Weights that are elsewhere meanwhile have given their memory back.
    if not is_read or tensor.untyped_storage().nbytes() < tensor.nbytes:
        return None
    size, address = tensor.nbytes, tensor.data_ptr()
    if size <= SMALL_BYTES:
        return ctypes.string_at(address, size)
    whole = size - size % 8
    numbers = np.frombuffer(memoryview((ctypes.c_char * whole).from_address(address)), np.uint64)
    return int(numbers.sum()) ^ hash(ctypes.string_at(address + whole, size - whole))


def contents_of(tensors: Iterable[torch.Tensor | None]) -> list[bytes | int | None]:
    """The content of each, None for those that are None."""
    return [None if tensor is None else content_of(tensor) for tensor in tensors]


def is_any_written(before: Sequence[bytes | int | None], tensors: Iterable[torch.Tensor | None]) -> bool:
    """Whether a tensor has another content than before, among those that could be read both times."""
    pairs = zip(before, contents_of(tensors), strict=True)
    return any(first is not None and now is not None and first != now for first, now in pairs)
