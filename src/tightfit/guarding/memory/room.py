"""How much memory a part of a batch takes on a card, and how much there is for it."""

import time
from collections.abc import Callable
from typing import Protocol

import torch

# What the allocator cannot use of its memory, as pieces lie between others.
_USABLE = 0.92


class Room(Protocol):
    """Counts the memory of one device."""

    def free_bytes(self) -> int:
        """What can be allocated beside what is there now."""
        ...

    def measured(self, call: Callable[[], object]) -> tuple[int, float]:
        """The bytes that a call has held beyond what was there before, at most, and its seconds."""
        ...


class CardRoom:
    """The memory of a card, as torch's allocator counts it. A measurement sets its peak counters back."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free_bytes(self) -> int:
        """What is free on the card and what the allocator holds without use, within the share of this process."""
        free, total = torch.cuda.mem_get_info(self._device)
        reserved, allocated = torch.cuda.memory_reserved(self._device), torch.cuda.memory_allocated(self._device)
        share = torch.cuda.get_per_process_memory_fraction(self._device)
        return int(_USABLE * min(free + reserved, share * total)) - allocated

    def measured(self, call: Callable[[], object]) -> tuple[int, float]:
        """As `Room.measured`; it waits for the card."""
        torch.cuda.synchronize(self._device)
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        begun = time.perf_counter()
        call()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - before, time.perf_counter() - begun


def room_on(device: torch.device | None) -> Room | None:
    """What counts the memory of a device; None where nothing does, as at the host."""
    return CardRoom(device) if device is not None and device.type == "cuda" else None
