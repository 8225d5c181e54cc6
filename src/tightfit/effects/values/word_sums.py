"""Sums over all bits of tensors that need no memory to speak of, wherever the tensors are.

torch converts a tensor as a whole before it sums it in a wider type (aten/src/ATen/native/ReduceOpsUtils.h, `make_reduction`): a check that sums
integers of 16 bits in 64 would hold four times what it looks at, which no plan has promised. So words of 64 bits are summed where the memory allows
that, and pieces where it does not.
"""

import torch

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WORD_BYTES = 8
_REAL = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32))
# No batch, width or number of channels is likely to be a multiple of it.
_STEP = 61
_IMAGES = 4
# Of which a piece in 64 bits has 8 MiB.
PIECE = 1 << 20


def sum_of_words(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of the words of a strided tensor, which wraps around, as an int64 tensor of no dimension beside it. Integers add up to the same in any order."""
    # A dimension of one may have any stride.
    is_plain = tensor.is_contiguous() and 1 not in tensor.shape and not tensor.is_neg()
    if tensor.dtype in _REAL and is_plain and is_of_whole_words(tensor):
        # Most are so, and what is asked here is the processor's time of each step.
        return tensor.detach().view(torch.int64).sum()
    value = tensor.detach().resolve_conj().resolve_neg()
    if value.is_complex():
        value = torch.view_as_real(value)
    size = value.element_size()
    if value.is_contiguous() or (value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last)):
        flat = value.as_strided((value.numel(),), (1,))
        return wide_sum(flat.view(torch.int64 if is_of_whole_words(flat) else WORDS[size]), torch.int64)
    return wide_sum(value.view(WORDS[size]), torch.int64)


def sums_of_columns(tensor: torch.Tensor) -> torch.Tensor:
    """Sums of the words of a strided tensor that change when words change places: int64 of one dimension, as many for the same shape and strides.

    Its memory is read as rows that begin every `_STEP` words, so that one kernel reads all of it, and a sum is made of each column. What is moved by another
    number of words than a multiple of that prime comes to another column: rows of a batch, halves, signs. A tensor with gaps has one sum, which knows no places.
    """
    value = tensor.detach()
    if value.is_conj() or value.is_neg():
        value = value.resolve_conj().resolve_neg()
    if value.is_complex():
        value = torch.view_as_real(value)
    if not (
        value.is_contiguous() or (value.dim() == _IMAGES and value.is_contiguous(memory_format=torch.channels_last))
    ):
        return sum_of_words(tensor).view(1)
    flat = value.as_strided((value.numel(),), (1,))
    flat = flat.view(torch.int64 if is_of_whole_words(flat) else WORDS[flat.element_size()])
    num_rows = max(0, len(flat) // _STEP - 1)
    # The last of the overlapping rows ends with the last word.
    rows = flat.as_strided((num_rows + 1, len(flat) - num_rows * _STEP), (_STEP, 1))
    if rows.dtype == torch.int64:
        return rows.sum(0)
    pieces = [piece.sum(0, dtype=torch.int64) for piece in rows.split(max(1, PIECE // rows.shape[1]))]
    return torch.stack(pieces).sum(0)


def is_of_whole_words(value: torch.Tensor) -> bool:
    """Whether a contiguous tensor, and each of its rows, can be seen as words of 64 bits."""
    size = value.element_size()
    last = value.shape[-1] if value.dim() else 1
    return bool(last) and not (last * size) % _WORD_BYTES and not (value.storage_offset() * size) % _WORD_BYTES


def wide_sum(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The sum in a wider type, in pieces: each is converted by itself."""
    if value.dtype == dtype or value.numel() <= PIECE:
        return value.sum(dtype=dtype)
    longest = max(range(value.dim()), key=value.shape.__getitem__)
    rows = max(1, PIECE // (value.numel() // value.shape[longest]))
    return torch.stack([piece.sum(dtype=dtype) for piece in value.split(rows, longest)]).sum()
