"""Scratch memory of Fourier transforms: the work area of cuFFT and the copies around a plan.

cuFFT states the size of a plan's work area only at run time. What is known: transforms whose length has only the prime factors 2, 3, 5 and 7
need at most about the size of the data, other lengths several times that (cuFFT documentation, "Data Layout" and "Bluestein").
`_exec_fft` (SpectralOps.cpp) takes the work area from the caching allocator for each call.
"""

from collections.abc import Iterator, Sequence

import torch
from torch._ops import OpOverload

from tightfit.capture.kernels.architecture import Card
from tightfit.capture.kernels.rule import Arguments, Outputs, Rule, num_bytes

aten = torch.ops.aten

_LENGTH_IN_SHARED_MEMORY = 4096  # powers of two up to here run in one kernel, without a work area
_BLUESTEIN_FACTOR = 4


def _is_smooth(length: int) -> bool:
    for prime in (2, 3, 5, 7):
        while length % prime == 0:
            length //= prime
    return length == 1


def _fft(arguments: Arguments, outputs: Outputs, _card: Card) -> Iterator[int]:
    tensor: torch.Tensor = arguments["self"]
    dims = [dim % tensor.dim() for dim in arguments["dim"]]
    data = max([num_bytes(tensor), *(num_bytes(output) for output in outputs if output is not None)])
    trailing = sorted(dims) == list(range(tensor.dim() - len(dims), tensor.dim()))
    # cuFFT transforms trailing dimensions of dense data. A transform to real numbers needs a copy as well,
    # since it overwrites its input (cuFFT documentation).
    if not trailing or not tensor.is_contiguous() or "last_dim_size" in arguments:
        yield num_bytes(tensor)
    lengths = [tensor.shape[dim] for dim in dims]
    if not all(_is_smooth(length) for length in lengths):
        # Bluestein's algorithm pads a length n to at least 2n - 1, in two complex buffers.
        yield _BLUESTEIN_FACTOR * data
    elif len(dims) > 1 or any(length & (length - 1) or length > _LENGTH_IN_SHARED_MEMORY for length in lengths):
        yield data


_OPERATORS: Sequence[OpOverload] = (aten._fft_c2c.default, aten._fft_r2c.default, aten._fft_c2r.default)

RULES: dict[OpOverload, Rule] = dict.fromkeys(_OPERATORS, _fft)
