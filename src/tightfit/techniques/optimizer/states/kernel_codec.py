"""Block-wise codes by Triton kernels of ours, which torch's wheels for Linux bring what is needed for: the same codes and scales as `BlockCodec`, in one pass each.

Before they are used for a type of numbers their codes, scales and restored numbers are compared with those of torch's operators on the card that they run on, bit for bit; where they
differ or do not compile, torch's operators are taken, and it is said. On the virtual GPU each is one operator.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import final

import torch
from torch._subclasses.fake_tensor import FakeTensor

from tightfit.techniques.optimizer.states.state_codecs import (
    AbstractCodec,
    BlockCodec,
    Encoded,
    Tables,
    is_coded_in_blocks,
)
from tightfit.techniques.optimizer.states.state_sizes import BLOCK_SIZE, Bits

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@final
class KernelCodec(AbstractCodec):
    """Codes of `bits` bits, for a model of which `beside` is a parameter. `tell` is called with a note where torch's operators have to do."""

    def __init__(self, bits: Bits, beside: torch.Tensor, tell: Callable[[str], None]) -> None:
        self._bits: Bits = bits
        self._plain = BlockCodec(bits)
        self._tables = Tables(bits)
        self._is_virtual = isinstance(beside, FakeTensor)
        if self._is_virtual:
            _define_operators()
        self._tell = tell
        self._tried_out: dict[tuple[torch.device, torch.dtype], bool] = {}

    def takes(self, name: str, shape: torch.Size) -> bool:
        return is_coded_in_blocks(name, shape)

    def encode(self, name: str, value: torch.Tensor) -> Encoded:
        if not self._has_kernels_for(value.device, value.dtype):
            return self._plain.encode(name, value)
        flat, borders = value.reshape(-1), self._tables.borders(name, value.device)
        if self._is_virtual:
            codes, scales = torch.ops.tightfit.encode_blocks(flat, borders, self._bits)
            return Encoded(main=codes, rest=scales)
        return self._encoded(flat.contiguous(), borders)

    def decode(self, name: str, encoded: Encoded, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        if not self._has_kernels_for(encoded.main.device, dtype):
            return self._plain.decode(name, encoded, shape, dtype)
        table = self._tables.table(name, encoded.main.device)
        if self._is_virtual:
            return torch.ops.tightfit.decode_blocks(encoded.main, encoded.rest, table, list(shape), dtype)
        return self._decoded(encoded, table, shape, dtype)

    def num_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        return self._plain.num_bytes(shape, dtype)

    def _has_kernels_for(self, device: torch.device, dtype: torch.dtype) -> bool:
        if device.type != "cuda" or dtype not in _DTYPES:
            return False
        if self._is_virtual:
            return True
        if (device, dtype) not in self._tried_out:
            self._tried_out[device, dtype] = self._is_tried_out(device, dtype)
        return self._tried_out[device, dtype]

    def _encoded(self, flat: torch.Tensor, borders: torch.Tensor) -> Encoded:
        from tightfit.techniques.optimizer.states import block_kernels

        codes, scales = _empty_codes(flat, self._bits)
        with _on(flat.device):
            block_kernels.encode(flat, borders, codes, scales)
        return Encoded(main=codes, rest=scales)

    def _decoded(self, encoded: Encoded, table: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        from tightfit.techniques.optimizer.states import block_kernels

        whole = torch.empty(shape, dtype=dtype, device=encoded.main.device)
        with _on(whole.device):
            block_kernels.decode(encoded.main, encoded.rest, table, whole.view(-1))
        return whole

    def _is_tried_out(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Tells why not, if not."""
        try:
            differing = "" if self._are_alike(device, dtype) else f"they encode {dtype} differently"
        except Exception as error:  # noqa: BLE001 - whatever Triton, its compiler or the driver say; nothing of the program is in it
            lines = str(error).strip().splitlines()
            differing = f"{type(error).__name__}{': ' + lines[0][:200] if lines else ''}"
        if differing:
            self._tell(
                "optimizer states are quantised with torch's own operators, which needs more time and memory than "
                f"planned: the kernels cannot be used here ({differing})"
            )
        return not differing

    def _are_alike(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether kernels and operators code and restore all kinds of blocks alike: zeros, subnormal numbers, NaN, infinity, all decades, and one that is not full."""
        size = BLOCK_SIZE[self._bits]
        for more in (0, 3):  # Triton compiles anew for a number that 16 does not divide
            # To the fifth power, so that all decades of the table occur.
            numbers = torch.linspace(-1, 1, 40 * size + more, device=device, dtype=torch.float32).pow(5)
            numbers[size : 2 * size] = 0
            # Squares of small gradients: a compiler may take such numbers for zero.
            numbers[7 * size : 8 * size] *= 1e-39
            numbers[3 * size], numbers[5 * size + 1] = float("nan"), float("inf")
            for name, values in (("exp_avg", numbers), ("exp_avg_sq", numbers.abs())):
                value, table = values.to(dtype), self._tables.table(name, device)
                expected = self._plain.encode(name, value)
                coded = self._encoded(value, self._tables.borders(name, device))
                restored = self._decoded(expected, table, value.shape, dtype)
                plain = self._plain.decode(name, expected, value.shape, dtype)
                if not torch.equal(coded.main, expected.main):
                    return False
                if not (_are_same(coded.rest, expected.rest) and _are_same(restored, plain)):
                    return False
        return True


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    # Triton compiles for the current GPU and launches on its stream.
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _are_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit, but for what kind of NaN it is."""
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _empty_codes(flat: torch.Tensor, bits: Bits) -> tuple[torch.Tensor, torch.Tensor]:
    num_blocks = -(-flat.numel() // BLOCK_SIZE[bits])
    codes = flat.new_empty((num_blocks, BLOCK_SIZE[bits] * bits // 8), dtype=torch.uint8)
    return codes, flat.new_empty(num_blocks, dtype=torch.float32)


@functools.cache
def _define_operators() -> None:
    """Operators that have shapes alone, for the virtual GPU: a kernel on the tape each."""
    torch.library.define("tightfit::encode_blocks", "(Tensor values, Tensor borders, int bits) -> (Tensor, Tensor)")
    torch.library.define(
        "tightfit::decode_blocks",
        "(Tensor codes, Tensor scales, Tensor table, int[] shape, ScalarType dtype) -> Tensor",
    )

    @torch.library.register_fake("tightfit::encode_blocks")
    def _encode(values: torch.Tensor, borders: torch.Tensor, bits: Bits) -> tuple[torch.Tensor, torch.Tensor]:
        return _empty_codes(values, bits)

    @torch.library.register_fake("tightfit::decode_blocks")
    def _decode(
        codes: torch.Tensor, scales: torch.Tensor, table: torch.Tensor, shape: list[int], dtype: torch.dtype
    ) -> torch.Tensor:
        return codes.new_empty(shape, dtype=dtype)
