"""Copies of batches to a card that the host does not wait for: through a bounded ring of page-locked memory, on a stream of their own.

A program's batch is ordinary memory that it may write to at once, so its bytes are first copied to the ring, by the host and before the call returns: what reaches the
card is what the batch was at the call. From there the copy runs on a side stream into a ring on the card, beside what the computation still does, and a copy within the
card, which waits for it, fills the tensor that the program gets: that is memory of the computation's own stream as any other, which nobody has to keep or to mark. Without a
ring on the card the copy runs on the computation's stream. Each ring is bounded: what is still being read is waited for before its memory is used again, by the host
at the host and by the side stream on the card. On the host a thread is the card's copy engine, and the rest is the same code.
"""

import abc
import dataclasses
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, final

import torch

from tightfit.capture.observe.host_python import copies_in_memory, spends
from tightfit.cost.host_python import HostWork
from tightfit.engine.copy_engines import HostCopies, Ticket
from tightfit.engine.free_ranges import FreeRanges
from tightfit.engine.host_slab import HostSlab

RING_ALIGNMENT = 512
"""Of each tensor in a ring; blocks of the caching allocator have it too."""


class CopyLane(abc.ABC):
    """The way of batches to one card."""

    @abc.abstractmethod
    def copy(self, source: torch.Tensor, target: torch.Tensor, *, is_beside: bool) -> Any:
        """Begins a copy from page-locked memory, beside the computation or in order with it; returns its event."""

    @abc.abstractmethod
    def mark(self) -> Any:
        """An event at the present place of the computation."""

    @abc.abstractmethod
    def hold_back(self, event: Any) -> None:
        """Copies beside the computation that begin from now on come after the event."""

    @abc.abstractmethod
    def wait(self, event: Any) -> None:
        """What is computed from now on comes after the event."""

    @abc.abstractmethod
    def finish(self, event: Any) -> None:
        """The host waits for the event."""


@final
class CardLane(CopyLane):
    """A side stream of a card, created once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)

    def copy(self, source: torch.Tensor, target: torch.Tensor, *, is_beside: bool) -> Any:
        """As in `CopyLane`."""
        stream = self._side if is_beside else torch.cuda.current_stream(self._device)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return stream.record_event()

    def mark(self) -> Any:
        """As in `CopyLane`."""
        return torch.cuda.current_stream(self._device).record_event()

    def hold_back(self, event: Any) -> None:
        """As in `CopyLane`."""
        self._side.wait_event(event)

    def wait(self, event: Any) -> None:
        """As in `CopyLane`."""
        torch.cuda.current_stream(self._device).wait_event(event)

    def finish(self, event: Any) -> None:
        """As in `CopyLane`."""
        event.synchronize()


@final
class HostLane(CopyLane):
    """A thread: computation on the host is over when its call returns."""

    def __init__(self) -> None:
        self._copies = HostCopies()

    def copy(self, source: torch.Tensor, target: torch.Tensor, *, is_beside: bool) -> Any:
        """As in `CopyLane`."""
        ticket = self._copies.begin(source, target, to_host=False)
        if not is_beside:
            self._copies.wait(ticket)
        return ticket

    def mark(self) -> Any:
        """As in `CopyLane`: nothing to wait for."""
        return None

    def hold_back(self, event: Any) -> None:
        """As in `CopyLane`."""

    def wait(self, event: Ticket) -> None:
        """As in `CopyLane`."""
        self._copies.wait(event)

    def finish(self, event: Ticket) -> None:
        """As in `CopyLane`."""
        self._copies.wait(event)


class _Ring:
    """Ranges of `memory` that are read until an event, the oldest first; `wait` is what comes before a range is used again."""

    def __init__(self, memory: torch.Tensor, wait: Callable[[Any], object]) -> None:
        self._memory = memory
        self._free = FreeRanges(len(memory), alignment=RING_ALIGNMENT)
        self._wait = wait
        self._read: deque[tuple[tuple[int, int], Any]] = deque()

    def take(self, like: torch.Tensor) -> "tuple[tuple[int, int], torch.Tensor] | None":
        """A range for a tensor like this one, and the tensor; None if the ring is smaller, or what an interrupt has cut short holds too much of it."""
        if self._free.rounded(like.nbytes) > len(self._memory):
            return None
        while (place := self._free.take(like.nbytes)) is None:
            if not self._read:
                return None
            self._use_oldest()
        own = self._memory[place[0] : place[0] + like.nbytes].view(like.dtype)
        return place, own.as_strided(like.size(), like.stride())

    def read_until(self, place: tuple[int, int], event: Any) -> None:
        """The range is read until the event."""
        self._read.append((place, event))

    def drain(self) -> None:
        """Waits for all that is read."""
        while self._read:
            self._use_oldest()

    def _use_oldest(self) -> None:
        place, event = self._read[0]
        self._wait(event)
        self._read.popleft()
        self._free.give_back(*place)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Begun:
    slab: HostSlab
    at_host: _Ring
    on_card: _Ring
    lane: CopyLane


class BatchCopies:
    """Copies to `device` through `host_bytes` of the host's memory and, where it is not 0, `card_bytes` of the card's. Both are taken with the first copy."""

    def __init__(self, *, host_bytes: int, card_bytes: int, device: torch.device, lane: CopyLane | None = None) -> None:
        self._host_bytes, self._card_bytes = host_bytes, card_bytes
        self._device = device
        self._lane = lane
        self._process = os.getpid()
        # A program's threads may each copy a batch.
        self._lock = threading.RLock()
        self._begun: _Begun | None = None

    @property
    def slab(self) -> HostSlab | None:
        """The memory at the host, once there is any."""
        return self._begun.slab if self._begun is not None else None

    def copy(self, source: torch.Tensor) -> torch.Tensor | None:
        """`source`, a dense tensor of the host's, on the card; None where it is larger than the ring, or this is a fork of the process, which has no ring."""
        if self._process != os.getpid() or source.nbytes > self._host_bytes:
            return None
        # Without `no_grad`, which an interrupt could leave on: nothing here needs a gradient.
        with self._lock:
            begun = self._begun = self._begun or self._begin()
            # First, since it may raise: what is taken of a ring and not given to `read_until` is never used again.
            target = torch.empty_like(source, device=self._device)
            staged = begun.at_host.take(source)
            if staged is None:
                return None
            self._fill(begun, source, staged, target)
            return target

    def _begin(self) -> _Begun:
        lane = self._lane or CardLane(self._device)
        slab = HostSlab(self._host_bytes, self._device, is_in_forks=False)
        try:
            on_card = torch.empty(self._card_bytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError:
            # Copies are then in order with the computation.
            on_card = torch.empty(0, dtype=torch.uint8, device=self._device)
        # What the computation has used that memory for until now is over before a copy beside it writes there.
        lane.hold_back(lane.mark())
        at_host = slab.take(self._host_bytes).bytes
        return _Begun(slab=slab, at_host=_Ring(at_host, lane.finish), on_card=_Ring(on_card, lane.hold_back), lane=lane)

    def _fill(
        self, begun: _Begun, source: torch.Tensor, staged: tuple[tuple[int, int], torch.Tensor], target: torch.Tensor
    ) -> None:
        """Copies `source` to `target`. A `data` has a version of its own: the program's tensor is as new as one that torch has copied."""
        spends(HostWork.BATCH_COPY)
        copies_in_memory(source.nbytes)
        staged[1].copy_(source)
        slot = begun.on_card.take(source)
        if slot is None:
            begun.at_host.read_until(staged[0], begun.lane.copy(staged[1], target.data, is_beside=False))
            return
        arrived = begun.lane.copy(staged[1], slot[1], is_beside=True)
        begun.at_host.read_until(staged[0], arrived)
        begun.lane.wait(arrived)
        target.data.copy_(slot[1])
        begun.on_card.read_until(slot[0], begun.lane.mark())

    def end(self) -> None:
        """Waits for all copies, and lets go of the memory."""
        with self._lock:
            begun, self._begun = self._begun, None
            if begun is not None and self._process == os.getpid():
                begun.at_host.drain()
                begun.on_card.drain()
