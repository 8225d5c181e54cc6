"""Optimizer states in few bits at the host: encoded on the card, and only the codes move.

In 8 bits a state is codes with a scale for each block (`BlockCodec`), a quarter of the bytes of float32; in bfloat16 it is rounded at random, half of them, so
that averages which change by less than their last bit are right on average (Gupta et al., arXiv:1502.02551).
"""

import dataclasses
from typing import final

import torch

from tightfit.techniques.optimizer.at_host.host_codec import HostCodec
from tightfit.techniques.optimizer.states.state_codecs import AbstractCodec, Encoded
from tightfit.techniques.optimizer.states.state_sizes import MIN_NUMBERS, NUMBERS_PER_PIECE
from tightfit.techniques.precision.stochastic_rounding import Rounded


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CodedAtHost(Encoded):
    """`parts` are codes and scales at the host, with the `forms` that they have on the card."""

    parts: tuple[Encoded, ...]
    forms: tuple[tuple[torch.Size, torch.dtype], ...]


@final
class CodedHostCodec(AbstractCodec):
    """What `inner` encodes on the card is copied by `host`."""

    def __init__(self, inner: AbstractCodec, host: HostCodec) -> None:
        self._inner = inner
        self._host = host

    def takes(self, name: str, shape: torch.Size) -> bool:
        return self._inner.takes(name, shape)

    def encode(self, name: str, value: torch.Tensor) -> Encoded:
        coded = self._inner.encode(name, value)
        tensors = [tensor for tensor in (coded.main, coded.rest) if tensor.numel()]
        parts = tuple(self._host.encode(name, tensor) for tensor in tensors)
        rest = parts[-1].main if len(parts) > 1 else parts[0].main[:0]
        forms = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        return CodedAtHost(main=parts[0].main, rest=rest, parts=parts, forms=forms)

    def begin(self, encoded: Encoded, shape: torch.Size, dtype: torch.dtype) -> Encoded:
        assert isinstance(encoded, CodedAtHost)
        coming = (self._host.begin(part, *form) for part, form in zip(encoded.parts, encoded.forms, strict=True))
        return dataclasses.replace(encoded, parts=tuple(coming))

    def decode(self, name: str, encoded: Encoded, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        assert isinstance(encoded, CodedAtHost)
        on_card = [
            self._host.decode(name, part, *form) for part, form in zip(encoded.parts, encoded.forms, strict=True)
        ]
        coded = Encoded(main=on_card[0], rest=on_card[1] if len(on_card) > 1 else on_card[0][:0])
        return self._inner.decode(name, coded, shape, dtype)

    def num_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        return self._inner.num_bytes(shape, dtype)

    @property
    def num_begun(self) -> int:
        return self._host.num_begun

    def settle(self, until: int | None = None) -> None:
        self._host.settle(until)


@final
class RoundedCodec(AbstractCodec):
    """bfloat16, rounded up or down at random; what has 16 bits stays as it is."""

    def __init__(self) -> None:
        self._rounded = Rounded()

    def takes(self, name: str, shape: torch.Size) -> bool:
        return shape.numel() >= MIN_NUMBERS

    def encode(self, name: str, value: torch.Tensor) -> Encoded:
        flat = value.detach().reshape(-1)
        if value.element_size() <= torch.bfloat16.itemsize:
            return Encoded(main=flat.clone(), rest=flat[:0])
        rounded = torch.empty_like(flat, dtype=torch.bfloat16)
        for piece, into in zip(flat.split(NUMBERS_PER_PIECE), rounded.split(NUMBERS_PER_PIECE), strict=True):
            into.copy_(self._rounded.of(piece.float()))
        return Encoded(main=rounded, rest=rounded[:0])

    def decode(self, name: str, encoded: Encoded, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        return encoded.main.view(shape).to(dtype)

    def num_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        return shape.numel() * min(dtype.itemsize, torch.bfloat16.itemsize)
