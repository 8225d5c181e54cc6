"""Formats of optimizer states: block-wise 8-bit or 4-bit quantisation, and row and column means of a matrix.

Blocks: Dettmers et al., "8-bit optimizers via block-wise quantization" (arXiv:2110.02861): each block is divided by its largest magnitude, and the
quotients are rounded to the nearest entry of a table that is finer towards zero, over seven decades. Four bits: Li et al. (arXiv:2309.01507), with
smaller blocks, and for squares a linear table without zero. Rows and columns: Shazeer and Stern, "Adafactor" (arXiv:1804.04235).
"""

import abc
import dataclasses
import functools
from typing import ClassVar, final

import torch

from tightfit.techniques.optimizer.states.state_sizes import BLOCK_SIZE, MIN_NUMBERS, NUMBERS_PER_PIECE, Bits

# Names of the states of torch.optim that may be quantised; squares are never negative. Sums that only grow
# (Adagrad's) are left out: each new term is below the resolution.
SIGNED = frozenset({"exp_avg", "momentum_buffer", "grad_avg"})
SQUARES = frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg", "exp_inf"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A state in a smaller format: two tensors, such as codes and scales."""

    main: torch.Tensor
    rest: torch.Tensor


class AbstractCodec(abc.ABC):
    """A format that keeps a tensor in fewer bytes. With `is_exact` nothing of it may be seen by the program."""

    is_exact: ClassVar[bool] = False

    @abc.abstractmethod
    def takes(self, name: str, shape: torch.Size) -> bool:
        """Whether the state called `name`, of a parameter of this shape, is kept in this format."""

    @abc.abstractmethod
    def encode(self, name: str, value: torch.Tensor) -> Encoded:
        """Encodes `value`, of any floating-point dtype; the arithmetic is in float32."""

    @abc.abstractmethod
    def decode(self, name: str, encoded: Encoded, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Decodes to a tensor of shape `shape`, rounded to `dtype`."""

    def begin(self, encoded: Encoded, shape: torch.Size, dtype: torch.dtype) -> Encoded:
        """Begins to bring what `decode` needs; it is given the result in place of `encoded`, on whatever became of that meanwhile."""
        return encoded

    def num_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        """What `begin` brings to the card."""
        return shape.numel() * dtype.itemsize

    @property
    def num_begun(self) -> int:
        """How many states have been encoded so far, as `settle` counts them."""
        return 0

    def settle(self, until: int | None = None) -> None:  # noqa: B027 - most have nothing under way
        """Frees what encoding has kept on the card: of all states, or of the first `until` ever encoded."""


@final
class BlockCodec(AbstractCodec):
    """Codes of `bits` bits, with a scale for each block of 256 (8 bits) or 128 (4 bits) elements."""

    def __init__(self, bits: Bits) -> None:
        self.bits: Bits = bits
        self._tables = Tables(bits)

    def takes(self, name: str, shape: torch.Size) -> bool:
        return is_coded_in_blocks(name, shape)

    def encode(self, name: str, value: torch.Tensor) -> Encoded:
        size = BLOCK_SIZE[self.bits]
        flat = value.reshape(-1)
        num_blocks = -(-flat.numel() // size)
        codes = flat.new_empty((num_blocks, size * self.bits // 8), dtype=torch.uint8)
        scales = flat.new_empty(num_blocks, dtype=torch.float32)
        first = 0
        for piece in flat.split(NUMBERS_PER_PIECE):
            missing = -piece.numel() % size
            blocks = (torch.nn.functional.pad(piece, (0, missing)) if missing else piece).float().view(-1, size)
            of_piece = slice(first, first := first + len(blocks))
            torch.amax(blocks.abs(), 1, out=scales[of_piece])
            codes[of_piece] = self._codes(name, blocks, scales[of_piece])
        return Encoded(main=codes, rest=scales)

    def _codes(self, name: str, blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        # A block of zeros, as all states are at first, has the scale 0.
        normalised = blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
        codes = torch.bucketize(normalised, self._tables.borders(name, blocks.device), out_int32=True)
        return (codes[:, ::2] << 4).bitwise_or_(codes[:, 1::2]) if self.bits == 4 else codes

    def decode(self, name: str, encoded: Encoded, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        table = self._tables.table(name, encoded.main.device)
        whole = torch.empty(shape, dtype=dtype, device=encoded.main.device)
        blocks_per_piece = NUMBERS_PER_PIECE // BLOCK_SIZE[self.bits]
        for piece, codes, scales in zip(
            whole.view(-1).split(NUMBERS_PER_PIECE),
            encoded.main.split(blocks_per_piece),
            encoded.rest.split(blocks_per_piece),
            strict=True,
        ):
            single = torch.stack((codes >> 4, codes & 15), 2).flatten(1) if self.bits == 4 else codes
            piece.copy_(table[single.int()].mul_(scales[:, None]).view(-1)[: piece.numel()])
        return whole

    def num_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        size = BLOCK_SIZE[self.bits]
        num_blocks = -(-shape.numel() // size)
        return num_blocks * (size * self.bits // 8 + torch.float32.itemsize)


@final
class FactoredCodec(AbstractCodec):
    """Row and column means of a matrix of squares; a tensor with more dimensions is flattened to a matrix after the first one."""

    def takes(self, name: str, shape: torch.Size) -> bool:
        return name in SQUARES and len(shape) > 1 and shape.numel() >= MIN_NUMBERS

    def encode(self, name: str, value: torch.Tensor) -> Encoded:
        matrix = value.reshape(value.shape[0], -1)
        return Encoded(main=matrix.mean(1, dtype=torch.float32), rest=matrix.mean(0, dtype=torch.float32))

    def decode(self, name: str, encoded: Encoded, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        rows, columns = encoded.main, encoded.rest
        rows = rows / rows.mean().clamp_min(torch.finfo(torch.float32).tiny)
        whole = torch.empty(shape, dtype=dtype, device=rows.device)
        matrix = whole.view(len(rows), -1)
        for some_rows, into in zip(rows.split(many := _rows_per_piece(matrix)), matrix.split(many), strict=True):
            into.copy_(torch.outer(some_rows, columns))
        return whole


def _rows_per_piece(matrix: torch.Tensor) -> int:
    return max(1, NUMBERS_PER_PIECE // matrix.shape[1])


@final
class Tables:
    """The tables of `bits`-bit codes as tensors, made once for each device."""

    def __init__(self, bits: Bits) -> None:
        self._bits: Bits = bits
        self._made: dict[tuple[bool, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}

    def table(self, name: str, device: torch.device) -> torch.Tensor:
        """The values of the codes of the state `name`, float32 of shape (2**bits,)."""
        return self._of(name, device)[0]

    def borders(self, name: str, device: torch.device) -> torch.Tensor:
        """The midpoints between these values, float32 of shape (2**bits - 1,)."""
        return self._of(name, device)[1]

    def _of(self, name: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        key = (name in SIGNED, device)
        if key not in self._made:
            table = torch.tensor(table_of_codes(self._bits, is_signed=key[0]), device="cpu").to(device)
            self._made[key] = (table, (table[1:] + table[:-1]) / 2)
        return self._made[key]


def is_coded_in_blocks(name: str, shape: torch.Size) -> bool:
    """Whether a state can be quantised, and is large enough to be worth it."""
    return (name in SIGNED or name in SQUARES) and shape.numel() >= MIN_NUMBERS


@functools.cache
def table_of_codes(bits: Bits, *, is_signed: bool) -> tuple[float, ...]:
    """The 2**bits values of the codes, from -1 (or 0) to 1, in ascending order.

    Decades down from 1 have half as many entries each as the one above (arXiv:2110.02861, section 1.3), at the middle of equal steps; 0 and 1 besides.
    """
    if bits == 4 and not is_signed:
        # Without zero: a square that is rounded to zero would be divided by (the zero-point problem of
        # arXiv:2309.01507).
        return tuple((code + 1) / 16 for code in range(16))
    num_decades = bits - 1
    found = [0.0, 1.0]
    for decade in range(num_decades):
        num_steps = 2**decade if is_signed else 2 ** (decade + 1)
        scale = 10.0 ** (decade - num_decades + 1)
        middles = [scale * (0.1 + 0.9 * (step + 0.5) / num_steps) for step in range(num_steps)]
        found += middles
        if is_signed:
            found += [-middle for middle in middles]
    return tuple(sorted(found))
