"""Optimizer states in host memory: the format that a state has between steps is its own bytes, at the host.

A state comes to the card for the update of its parameter and goes back afterwards, while the next parameter's comes: both directions of the link are
used at once, and the states of two parameters are on the card.
"""

import dataclasses
from typing import final

import torch

from tightfit.engine.copies import Copies, Ticket, copies_for
from tightfit.engine.host_slab import HostSlab, Part
from tightfit.techniques.optimizer.state_codecs import AbstractCodec, Encoded
from tightfit.techniques.optimizer.state_sizes import MIN_NUMBERS


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AtHost(Encoded):
    """A state at the host; `stride` is that which it has on the card."""

    part: Part
    stride: tuple[int, ...]


@final
class HostCodec(AbstractCodec):
    """Copies to `host_bytes` of host memory and back, for states on `device` of at least `least_elements`."""

    is_exact = True

    def __init__(self, device: torch.device, host_bytes: int, *, least_elements: int = MIN_NUMBERS) -> None:
        self._least_elements = least_elements
        self.slab = HostSlab(host_bytes, device)
        self._device = device
        self._copies: Copies = copies_for(device)
        self._under_way: list[Ticket] = []

    def takes(self, name: str, shape: torch.Size) -> bool:
        """Every state of a large parameter."""
        return shape.numel() >= self._least_elements

    def encode(self, name: str, value: torch.Tensor) -> Encoded:
        """Begins to copy `value` to the host; its memory on the card is kept until that is over."""
        value = value.detach()
        if not _is_dense(value):
            value = value.contiguous()
        flat = _flat(value)
        part = self.slab.take(len(flat))
        self._under_way.append(self._copies.begin(flat, part.bytes, to_host=True, held=(part,)))
        return AtHost(main=part.bytes, rest=part.bytes[:0], part=part, stride=value.stride())

    def decode(self, name: str, encoded: Encoded, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """The state on the card, for what is computed from now on."""
        assert isinstance(encoded, AtHost)
        whole = torch.empty_strided(shape, encoded.stride, dtype=dtype, device=self._device)
        ticket = self._copies.begin(encoded.part.bytes, _flat(whole), to_host=False, held=(encoded.part,))
        self._copies.wait(ticket)
        return whole

    def settle(self) -> None:
        """Frees the memory on the card of what has been copied to the host."""
        while self._under_way:
            self._copies.wait(self._under_way[-1])
            self._under_way.pop()


def _is_dense(value: torch.Tensor) -> bool:
    """Whether the elements are one range of memory, in whatever order."""
    sizes = sorted((stride, size) for stride, size in zip(value.stride(), value.shape, strict=True) if size > 1)
    expected = 1
    for stride, size in sizes:
        if stride != expected:
            return False
        expected *= size
    return True


def _flat(value: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense tensor in the order of memory, uint8, of shape (bytes,)."""
    return value.as_strided((value.numel(),), (1,)).view(torch.uint8)
