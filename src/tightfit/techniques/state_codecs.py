"""Smaller forms of an optimizer's states: blocks of 8-bit or 4-bit codes, and rows and columns of a matrix.

Blocks: Dettmers et al., "8-bit optimizers via block-wise quantization" (arXiv:2110.02861): each block is divided by its largest number, and what is left is
the nearest entry of a table that is finer towards zero, over seven decades. Four bits: Li et al. (arXiv:2309.01507), with smaller blocks, and for squares
a table of equal steps without zero. Rows and columns: Shazeer and Stern, "Adafactor" (arXiv:1804.04235).
"""

import abc
import dataclasses
import functools
from typing import Literal, final

import torch

Bits = Literal[8, 4]

# What the states of torch.optim are called that may be kept in fewer bits; squares are never negative. Sums that only grow
# (Adagrad's) are not among them: what is added falls below the resolution.
SIGNED = frozenset({"exp_avg", "momentum_buffer", "grad_avg"})
SQUARES = frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg", "exp_inf"})

_BLOCK_SIZE: dict[Bits, int] = {8: 256, 4: 128}
_MIN_NUMBERS = 4096  # a smaller tensor is not worth it (arXiv:2110.02861, section 3)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A state in a smaller form: `main` takes its place among the optimizer's states, `rest` lies beside it."""

    main: torch.Tensor
    rest: torch.Tensor


class AbstractCodec(abc.ABC):
    """A way to keep a tensor in fewer bytes."""

    @abc.abstractmethod
    def takes(self, name: str, shape: torch.Size) -> bool:
        """Whether the state called `name`, of a parameter of this shape, is kept in this form."""

    @abc.abstractmethod
    def encode(self, name: str, value: torch.Tensor) -> Encoded:
        """The smaller form of `value` (float32)."""

    @abc.abstractmethod
    def decode(self, name: str, encoded: Encoded, shape: torch.Size) -> torch.Tensor:
        """What `encoded` stands for, float32 of shape `shape`."""


@final
class BlockCodec(AbstractCodec):
    """Codes of `bits` bits, and a scale for each block of 256 (8 bits) or 128 (4 bits) numbers."""

    def __init__(self, bits: Bits) -> None:
        self.bits: Bits = bits

    def takes(self, name: str, shape: torch.Size) -> bool:
        return (name in SIGNED or name in SQUARES) and shape.numel() >= _MIN_NUMBERS

    def encode(self, name: str, value: torch.Tensor) -> Encoded:
        size = _BLOCK_SIZE[self.bits]
        flat = value.reshape(-1)
        missing = -flat.numel() % size
        blocks = (torch.nn.functional.pad(flat, (0, missing)) if missing else flat).view(-1, size)
        scale = blocks.abs().amax(1, keepdim=True)
        normalised = blocks / scale.clamp_min(torch.finfo(torch.float32).tiny)
        table = self._table(name, value.device)
        codes = torch.bucketize(normalised, (table[1:] + table[:-1]) / 2, out_int32=True).to(torch.uint8)
        if self.bits == 4:
            codes = (codes[:, ::2] << 4).bitwise_or_(codes[:, 1::2])
        return Encoded(main=codes, rest=scale.squeeze(1))

    def decode(self, name: str, encoded: Encoded, shape: torch.Size) -> torch.Tensor:
        codes = encoded.main
        if self.bits == 4:
            codes = torch.stack((codes >> 4, codes & 15), 2).flatten(1)
        blocks = self._table(name, codes.device)[codes.int()]
        blocks.mul_(encoded.rest[:, None])
        return blocks.view(-1)[: shape.numel()].view(shape)

    def _table(self, name: str, device: torch.device) -> torch.Tensor:
        return torch.tensor(table_of_codes(self.bits, is_signed=name in SIGNED), device=device)


@final
class FactoredCodec(AbstractCodec):
    """The means of the rows and of the columns of a matrix of squares; a tensor of more dimensions is one of its first and the others."""

    def takes(self, name: str, shape: torch.Size) -> bool:
        return name in SQUARES and len(shape) > 1 and shape.numel() >= _MIN_NUMBERS

    def encode(self, name: str, value: torch.Tensor) -> Encoded:
        matrix = value.reshape(value.shape[0], -1)
        return Encoded(main=matrix.mean(1), rest=matrix.mean(0))

    def decode(self, name: str, encoded: Encoded, shape: torch.Size) -> torch.Tensor:
        rows, columns = encoded.main, encoded.rest
        tiny = torch.finfo(torch.float32).tiny
        return torch.outer(rows / rows.mean().clamp_min(tiny), columns).view(shape)


@functools.cache
def table_of_codes(bits: Bits, *, is_signed: bool) -> tuple[float, ...]:
    """The 2**bits numbers from -1 (or 0) to 1 that codes stand for, in order.

    Decades down from 1 have half as many entries each as the one above (arXiv:2110.02861, section 1.3), at the middle of equal steps; 0 and 1 besides.
    """
    if bits == 4 and not is_signed:
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
