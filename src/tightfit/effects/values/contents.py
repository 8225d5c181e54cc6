"""Reads the contents of tensors at the host, which show writes that change no version (through `.data`, numpy, or an address), and results that differ.

No operator of torch runs for it, which a mode of the program's would see. Tensors on a card are not read: one would wait for it.

The checksum of a large tensor is made of the rows of a table of 64-bit words: of each row the sum of its words, each times an odd number of its own, so
that words which change places within a row are seen as well as rows that do. The upper half of a word is first added to its lower half (by XOR): times an odd number
the sign of a float, a word's highest bit, stays that bit, and those of two words would cancel. It takes as long as reading memory twice or three times (6 GB/s a core).
"""

import ctypes
import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

SMALL_BYTES = 1 << 14
"""Up to which size a content is kept as it is."""
_HASHED_BYTES = 1 << 12
_NUM_COLUMNS = 512
_WORD_BYTES = 8
_OF_ROWS = 2
# As many as a processor has near it.
_PIECE_WORDS = 1 << 15
_HALF_BITS = np.uint64(32)
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}
_OWN_DISPATCH = torch.Tensor.__torch_dispatch__


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor inside the wrappers of torch.func transforms, which have no memory to read."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def content_of(tensor: torch.Tensor) -> bytes | int | None:
    """The bytes of a small contiguous tensor at the host, and a checksum of any other; None for what cannot be read at once."""
    place = _place_of(tensor)
    if place is None:
        return None
    if place.num_bytes <= SMALL_BYTES and tensor.is_contiguous():
        return ctypes.string_at(tensor.data_ptr(), place.num_bytes)
    return place.checksum_from(tensor.data_ptr())


def checksum_of(tensor: torch.Tensor) -> int | None:
    """A checksum of the elements of a tensor at the host, in the order of its memory; None for what cannot be read at once."""
    place = _place_of(tensor)
    return None if place is None else place.checksum_from(tensor.data_ptr())


def contents_of(tensors: Iterable[torch.Tensor | None]) -> list[bytes | int | None]:
    """The content of each, None for those that are None."""
    return [None if tensor is None else content_of(tensor) for tensor in tensors]


def versions_and_contents(tensors: Iterable[torch.Tensor | None]) -> tuple[Any, ...]:
    """What tells whether tensors were written to: the version of each, and at the host its content, which is also written past torch (through `.data`)."""
    return tuple(
        None if tensor is None else (-1 if tensor.is_inference() else tensor._version, content_of(tensor))
        for tensor in tensors
    )


def is_any_written(before: Sequence[bytes | int | None], tensors: Iterable[torch.Tensor | None]) -> bool:
    """Whether a tensor has another content than before, among those that could be read both times."""
    pairs = zip(before, contents_of(tensors), strict=True)
    return any(first is not None and now is not None and first != now for first, now in pairs)


class StoredAt:
    """Where a tensor at the host lies in a storage, which may be gone later."""

    __slots__ = ("_offset", "_place", "_storage")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = weakref.ref(tensor.untyped_storage())
        self._offset = tensor.storage_offset() * tensor.element_size()
        self._place = _Place(tensor)

    def checksum(self) -> int | None:
        """As `checksum_of`, of what is there now; None if nobody has the storage any more, or it has given its memory back."""
        storage = self._storage()
        if storage is None or self._offset + self._place.num_bytes > storage.nbytes():
            return None
        address: Any = storage.data_ptr()
        return self._place.checksum_from(address + self._offset)


class _Place:
    """How the elements of a tensor lie in memory: `num_bytes` from the first to the last."""

    __slots__ = ("_bits", "_shape", "_size", "_stride", "num_bytes")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._shape, self._stride, self._size = tensor.shape, tensor.stride(), tensor.element_size()
        self._bits = tensor.is_conj(), tensor.is_neg()
        if tensor.is_contiguous():
            self.num_bytes = tensor.nbytes
        else:
            steps = ((length - 1) * step for length, step in zip(self._shape, self._stride, strict=True))
            self.num_bytes = 0 if 0 in self._shape else (1 + sum(steps)) * self._size

    def checksum_from(self, address: int) -> int:
        """The checksum of the elements, the first of which is at an address, and of their order."""
        if not self.num_bytes:
            return 0
        dims = self._dims()
        if len(dims) == 1 and dims[0][1] == self._size:
            return hash((dims[0][0], _of_bytes(address, self.num_bytes), self._order()))
        memory = (ctypes.c_char * self.num_bytes).from_address(address)
        return hash((_of_rows(memory, dims, self._size), self._order()))

    def _dims(self) -> list[tuple[int, int]]:
        """Lengths and steps in bytes from the outermost dimension to the innermost, with those that lie behind each other as one."""
        dims = [(1, self._size)]
        # Of what is expanded one of the same is read.
        places = (place for place in zip(self._stride, self._shape, strict=True) if place[0] and place[1] > 1)
        for stride, length in sorted(places):
            step, (inner, inner_step) = stride * self._size, dims[-1]
            if step == inner * inner_step:
                dims[-1] = (inner * length, inner_step)
            else:
                dims.append((length, step))
        return dims[::-1]

    def _order(self) -> tuple[int, ...]:
        """The steps between elements, and what views leave undone: a matrix and its transpose, or its conjugate, are the same memory."""
        return (*self._bits, *(s for s, length in zip(self._stride, self._shape, strict=True) if length > 1))


def _place_of(tensor: torch.Tensor) -> _Place | None:
    """How a tensor lies in the host's memory; None for others, and for weights that are elsewhere meanwhile and have given their memory back."""
    is_plain = (
        tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and type(tensor).__torch_dispatch__ is _OWN_DISPATCH
        and not isinstance(tensor, FakeTensor)
        and not tensor.is_quantized
        and not tensor.is_nested
        # Zeros without memory, of forward-mode derivatives.
        and not tensor._is_zerotensor()
    )
    if not is_plain:
        return None
    place = _Place(tensor)
    is_there = tensor.storage_offset() * tensor.element_size() + place.num_bytes <= tensor.untyped_storage().nbytes()
    return place if is_there else None


def _of_bytes(address: int, num_bytes: int) -> int:
    """The checksum of contiguous bytes."""
    if num_bytes <= _HASHED_BYTES:
        return hash(ctypes.string_at(address, num_bytes))
    memory = np.frombuffer(memoryview((ctypes.c_char * num_bytes).from_address(address)), np.uint8)
    whole = num_bytes - num_bytes % (_WORD_BYTES * _NUM_COLUMNS)
    sums = _of_table(memory[:whole].view(np.uint64).reshape(-1, _NUM_COLUMNS))
    return hash(sums.tobytes() + memory[whole:].tobytes())


def _of_table(words: np.ndarray) -> np.ndarray:
    """One word for each row, which depends on each word of it and on its place."""
    num_rows, num_columns = words.shape
    numbers = _odd_numbers(num_columns)
    found = np.empty(num_rows, np.uint64)
    length = max(1, _PIECE_WORDS // num_columns)
    for begin in range(0, num_rows, length):
        piece = words[begin : begin + length]
        mixed = piece >> _HALF_BITS
        mixed ^= piece
        np.dot(mixed, numbers, out=found[begin : begin + length])
    return found


@functools.lru_cache(maxsize=64)
def _odd_numbers(count: int) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 1 << 64, count, np.uint64) | np.uint64(1)


def _of_rows(memory: Any, dims: Sequence[tuple[int, int]], size: int) -> int:
    """The checksum of rows with gaps between them, given the lengths and steps of each dimension."""
    *outer, (length, step) = dims
    if step == size and not length * size % _WORD_BYTES:
        length, size = length * size // _WORD_BYTES, _WORD_BYTES
        step = size
    shape, steps = (*(n for n, _ in outer), length), (*(s for _, s in outer), step)
    elements: np.ndarray = np.ndarray(shape, _WORDS[size], memory, 0, steps)
    if size != _WORD_BYTES or elements.ndim != _OF_ROWS:
        return hash(tuple(hash(row.tobytes()) for row in elements))
    return hash(_of_table(elements).tobytes())
