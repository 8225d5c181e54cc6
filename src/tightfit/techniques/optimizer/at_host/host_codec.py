"""Optimizer states in host memory or on disk: the format that a state has between steps is its own bytes, in another place.

A state comes to the card for the update of its parameter, or ahead of it, and goes back afterwards, while the next ones come: both directions of the
link are used at once. How many are on the card is the matter of an `UpdateWindow`.
"""

import dataclasses
from collections import deque
from typing import final

import torch

from tightfit.capture.processes.process_role import is_simulated
from tightfit.engine.copy_engines import CopyEngine, Ticket, copies_for
from tightfit.engine.disk.disk_copies import DiskSpace
from tightfit.engine.disk.disk_slab import DiskPart, DiskSlab
from tightfit.engine.host_slab import HostSlab, Part
from tightfit.techniques.optimizer.states.state_codecs import AbstractCodec, Encoded
from tightfit.techniques.optimizer.states.state_sizes import MIN_NUMBERS
from tightfit.techniques.optimizer.updates.optimizer_kernels import is_dense


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AtHost(Encoded):
    """A state at the host or on disk; `stride` is that which it has on the card."""

    part: Part | DiskPart
    stride: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ComingState(Encoded):
    """A state on its way from the host: `main` is its memory on the card, `at_host` what is copied there."""

    at_host: AtHost
    ticket: Ticket


@final
class HostCodec(AbstractCodec):
    """Copies to `host_bytes` of host memory, or to `disk`, and back, for states on `device` of at least `least_elements`; `card` is that of the program where these
    states are at the host themselves."""

    is_exact = True

    def __init__(
        self,
        device: torch.device,
        host_bytes: int,
        *,
        least_elements: int = MIN_NUMBERS,
        disk: DiskSpace | None = None,
        card: torch.device | None = None,
    ) -> None:
        self._least_elements = least_elements
        self._device = device
        near = device if card is None else card
        # Nothing is copied on the virtual GPU, so no thread is needed there.
        link = copies_for(near if is_simulated() else device)
        self.slab: HostSlab | DiskSlab
        self.copies: CopyEngine
        if disk is None:
            self.slab, self.copies = HostSlab(host_bytes, device), link
        else:
            self.slab, self.copies = disk.opened(near, link)
        self._leaving: deque[Ticket] = deque()
        self._num_begun = 0

    def takes(self, name: str, shape: torch.Size) -> bool:
        """Every state of a large parameter."""
        return shape.numel() >= self._least_elements

    def encode(self, name: str, value: torch.Tensor) -> Encoded:
        """Begins to copy `value` to the host; its memory on the card is kept until that is over."""
        value = value.detach()
        if not is_dense(value):
            value = value.contiguous()
        flat = flat_bytes(value)
        # The step that this is a part of goes on.
        part = self.slab.take_or_keep(len(flat)) if isinstance(self.slab, DiskSlab) else self.slab.take(len(flat))
        self._leaving.append(self.copies.begin(flat, part.bytes, to_host=True, held=(part,)))
        self._num_begun += 1
        # What is on disk is no tensor.
        held = part.bytes if isinstance(part, Part) else flat.new_empty(0, device="cpu")
        return AtHost(main=held, rest=held[:0], part=part, stride=value.stride())

    def begin(self, encoded: Encoded, shape: torch.Size, dtype: torch.dtype) -> Encoded:
        """Begins to copy a state to the card."""
        assert isinstance(encoded, AtHost)
        whole = torch.empty_strided(shape, encoded.stride, dtype=dtype, device=self._device)
        ticket = self.copies.begin(encoded.part.bytes, flat_bytes(whole), to_host=False, held=(encoded.part,))
        return ComingState(main=whole, rest=encoded.rest, at_host=encoded, ticket=ticket)

    def decode(self, name: str, encoded: Encoded, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """The state on the card, for what is computed from now on."""
        coming = encoded
        if not isinstance(coming, ComingState):
            coming = self.begin(encoded, shape, dtype)
        assert isinstance(coming, ComingState)
        self.copies.wait(coming.ticket)
        if not self.copies.is_of_present_stream(coming.ticket):
            # Memory belongs to the stream that it was allocated on, and would be given to that stream's next tensor while this one computes.
            return self.decode(name, coming.at_host, shape, dtype)
        return coming.main

    @property
    def num_begun(self) -> int:
        """As in `AbstractCodec`."""
        return self._num_begun

    def settle(self, until: int | None = None) -> None:
        """Frees the memory on the card of what has been copied to the host."""
        kept = 0 if until is None else self._num_begun - until
        while len(self._leaving) > kept:
            self.copies.wait(self._leaving[0])
            self._leaving.popleft()


def flat_bytes(value: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense tensor in the order of memory, uint8, of shape (bytes,)."""
    return value.as_strided((value.numel(),), (1,)).view(torch.uint8)
