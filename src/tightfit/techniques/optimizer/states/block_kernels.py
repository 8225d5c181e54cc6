"""Triton kernels that quantise and restore optimizer states in blocks: one pass over memory each, and the codes that `BlockCodec` gives.

Imported only where Triton is, on a GPU. A program instance has `NUM_ROWS` blocks. The code of a number is how many borders are below it, found by bisection as
`torch.bucketize` does (aten/src/ATen/native/cuda/Bucketization.cu, `lower_bound`), with the same answer for NaN: the last code.
"""
# ruff: noqa: N803, PLR0124 - constants of a kernel are written in capitals, and NaN alone is not itself

import torch
import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]

_NUM_ROWS = 8
_TINY = torch.finfo(torch.float32).tiny


@triton.jit
def _scales_of(values):
    # A maximum leaves NaN out; amax does not, and a state that has become NaN has to stay it.
    largest = tl.max(tl.abs(values), axis=1)
    return tl.where(tl.sum((values != values).to(tl.int32), axis=1) > 0, float("nan"), largest)


@triton.jit
def _codes_of(values, scales, borders, BITS: tl.constexpr, TINY: tl.constexpr):
    normalised = tl.div_rn(values, tl.where(scales < TINY, TINY, scales)[:, None] + tl.zeros_like(values))
    codes = tl.zeros_like(values).to(tl.int32)
    for step in tl.static_range(BITS):
        width = 1 << (BITS - 1 - step)
        codes = tl.where(tl.load(borders + codes + (width - 1)) >= normalised, codes, codes + width)
    return codes


@triton.jit
def _encode(
    values, borders, codes, scales, num_values, num_blocks,
    BITS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, TINY: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_there = rows < num_blocks
    if BITS == 8:
        at = rows[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
        block = tl.load(values + at, mask=at < num_values, other=0.0).to(tl.float32)
        scale = _scales_of(block)
        tl.store(codes + at, _codes_of(block, scale, borders, BITS, TINY).to(tl.uint8), mask=is_there[:, None])
    else:
        # Two codes a byte, the first one above.
        packed = rows[:, None] * (SIZE // 2) + tl.arange(0, SIZE // 2)[None, :]
        first = tl.load(values + 2 * packed, mask=2 * packed < num_values, other=0.0).to(tl.float32)
        second = tl.load(values + 2 * packed + 1, mask=2 * packed + 1 < num_values, other=0.0).to(tl.float32)
        of_first, of_second = _scales_of(first), _scales_of(second)
        is_nan = (of_first != of_first) | (of_second != of_second)
        scale = tl.where(is_nan, float("nan"), tl.maximum(of_first, of_second))
        high, low = _codes_of(first, scale, borders, BITS, TINY), _codes_of(second, scale, borders, BITS, TINY)
        tl.store(codes + packed, ((high << 4) | low).to(tl.uint8), mask=is_there[:, None])
    tl.store(scales + rows, scale, mask=is_there)


@triton.jit
def _decode(
    codes, scales, table, values, num_values, num_blocks, BITS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_there = rows < num_blocks
    scale = tl.load(scales + rows, mask=is_there, other=0.0)[:, None]
    if BITS == 8:
        at = rows[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
        code = tl.load(codes + at, mask=is_there[:, None], other=0).to(tl.int32)
        tl.store(values + at, (tl.load(table + code) * scale).to(values.dtype.element_ty), mask=at < num_values)
    else:
        packed = rows[:, None] * (SIZE // 2) + tl.arange(0, SIZE // 2)[None, :]
        code = tl.load(codes + packed, mask=is_there[:, None], other=0).to(tl.int32)
        first, second = tl.load(table + (code >> 4)) * scale, tl.load(table + (code & 15)) * scale
        tl.store(values + 2 * packed, first.to(values.dtype.element_ty), mask=2 * packed < num_values)
        tl.store(values + 2 * packed + 1, second.to(values.dtype.element_ty), mask=2 * packed + 1 < num_values)


def encode(flat: torch.Tensor, borders: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Writes the codes, uint8 of shape (blocks, bytes of a block), and the scales, float32 of shape (blocks,), of contiguous numbers."""
    bits, size = _form(borders, codes)
    grid = (triton.cdiv(len(scales), _NUM_ROWS),)
    _encode[grid](
        flat, borders, codes, scales, flat.numel(), len(scales), BITS=bits, SIZE=size, ROWS=_NUM_ROWS, TINY=_TINY
    )


def decode(codes: torch.Tensor, scales: torch.Tensor, table: torch.Tensor, flat: torch.Tensor) -> None:
    """Writes the numbers that these codes and scales stand for, in the type of `flat`, which is contiguous."""
    bits, size = _form(table, codes)
    grid = (triton.cdiv(len(scales), _NUM_ROWS),)
    _decode[grid](codes, scales, table, flat, flat.numel(), len(scales), BITS=bits, SIZE=size, ROWS=_NUM_ROWS)


def _form(table: torch.Tensor, codes: torch.Tensor) -> tuple[int, int]:
    """The bits of a code and the numbers of a block. A table has 2**bits entries, its borders are one less."""
    bits = 8 if len(table) >= 255 else 4
    return bits, codes.shape[1] * 8 // bits
