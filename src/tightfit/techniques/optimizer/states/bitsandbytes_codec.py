"""8-bit optimizer states quantised by the kernels of bitsandbytes, if that library is installed.

It quantises in the same blocks, to the nearest entry of a given table (Dettmers et al., arXiv:2110.02861; csrc/kernels.cu, `dQuantize`), so it
gets ours: the codes are those of `BlockCodec`, except for quotients on a border between two entries. There are no temporaries and no float32
copy. The library is imported only if a plan names it.
"""

import importlib
import importlib.metadata
from contextlib import nullcontext
from typing import final

import torch
from torch._subclasses.fake_tensor import FakeTensor

from tightfit.errors import ApplyError
from tightfit.techniques.optimizer.states.state_codecs import (
    AbstractCodec,
    BlockCodec,
    Encoded,
    Tables,
    is_coded_in_blocks,
)
from tightfit.techniques.optimizer.states.state_sizes import BLOCK_SIZE, LIBRARY, is_installed
from tightfit.torch_hooks.no_card import no_card

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_NUMBERS = 2**31 - 1  # the kernels count in 32 bits
_REMEDY = "make the plan without it"


@final
class BitsandbytesCodec(AbstractCodec):
    """8-bit codes with a scale for each block of 256 elements, computed by the library for tensors on the device of `beside`.

    Raises:
        ApplyError: the library is not installed, cannot be loaded, or does not dequantise what it has quantised.
    """

    def __init__(self, beside: torch.Tensor) -> None:
        is_virtual = isinstance(beside, FakeTensor)
        _load(is_virtual=is_virtual)
        self._tables = Tables(8)
        if not is_virtual:
            self._try_out(beside.device)

    def takes(self, name: str, shape: torch.Size) -> bool:
        return is_coded_in_blocks(name, shape) and shape.numel() <= _MAX_NUMBERS

    def encode(self, name: str, value: torch.Tensor) -> Encoded:
        _check_stream(value.device)
        flat = value.reshape(-1)
        flat = flat if flat.dtype in _DTYPES else flat.float()
        table = self._tables.table(name, flat.device)
        # Its kernels for the host write to the first entry of the table (csrc/cpu_ops.cpp).
        table = table if flat.is_cuda else table.clone()
        codes, scales = torch.ops.bitsandbytes.quantize_blockwise(flat, table, BLOCK_SIZE[8])
        return Encoded(main=codes, rest=scales)

    def decode(self, name: str, encoded: Encoded, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        table = self._tables.table(name, encoded.main.device)
        via = dtype if dtype in _DTYPES else torch.float32
        whole = torch.ops.bitsandbytes.dequantize_blockwise(encoded.main, encoded.rest, table, BLOCK_SIZE[8], via)
        # No view: those are taken for tensors that the program has a part in, and stay whole.
        return whole.resize_(shape).to(dtype)

    def _try_out(self, device: torch.device) -> None:
        """Tests both kernels: one that is not compiled for this card would otherwise fail in the middle of a run, or silently."""
        # To the fourth power, so that all decades of the table occur.
        value = torch.linspace(0, 1, 16 * BLOCK_SIZE[8], device=device) ** 4
        own = BlockCodec(8)
        for name in ("exp_avg", "exp_avg_sq"):
            try:
                restored = self.decode(name, self.encode(name, value), value.shape, value.dtype)
            except RuntimeError as error:
                raise ApplyError(f"{LIBRARY} cannot quantise on {device}: {error}; {_REMEDY}") from error
            expected = own.decode(name, own.encode(name, value), value.shape, value.dtype)
            # Numbers on a border may be rounded either way: that is at most twice as far off as the nearest.
            if (restored - value).abs().max() > 2 * (expected - value).abs().max():
                raise ApplyError(f"{LIBRARY} does not decode on {device} what it encoded; {_REMEDY}")


def _load(*, is_virtual: bool) -> None:
    if not is_installed():
        raise ApplyError(
            f"the plan quantises optimizer states with {LIBRARY} 0.46 or later, which is not installed here; install "
            f"it, or {_REMEDY}"
        )
    try:
        # For virtual tensors only the shape rules of its operators are needed, and its kernels cannot be loaded
        # where torch has no CUDA.
        with no_card() if is_virtual else nullcontext():
            importlib.import_module(LIBRARY)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise ApplyError(f"{LIBRARY} cannot be imported ({error}); {_REMEDY}") from error


def _check_stream(device: torch.device) -> None:
    """The library quantises on the default stream whatever the current one is (csrc/ops.cu, `quantizeBlockwise`)."""
    if device.type == "cuda" and torch.cuda.current_stream(device) != torch.cuda.default_stream(device):
        raise ApplyError(f"{LIBRARY} works on the default stream only, and the optimizer steps on another; {_REMEDY}")
