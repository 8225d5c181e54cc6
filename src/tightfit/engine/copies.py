"""Copies between a card and the host that run beside the computation.

On a card there is one stream to the host and one back, created once: new streams in each step would be new pools of the caching allocator. Order is
kept by events alone and by references that are held until a copy is over; `record_stream` is not used, since it delays reuse until a side stream is
drained. Without a card a thread copies, and the rest is the same code.
"""

import abc
import dataclasses
import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, final

import torch


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ticket:
    """A copy that was begun. `done` is its event or future, `stream` the computation's stream at the time, `held` what must live until it is over."""

    is_to_card: bool
    done: Any
    stream: Any
    held: tuple[Any, ...]


class Copies(abc.ABC):
    """Copies in both directions, each in the order in which they are begun."""

    @abc.abstractmethod
    def begin(self, source: torch.Tensor, target: torch.Tensor, *, to_host: bool, held: tuple[Any, ...] = ()) -> Ticket:
        """Begins a copy of `source`, as the computation has left it by now, to `target`; `held` is kept alive until it is waited for."""

    @abc.abstractmethod
    def wait(self, ticket: Ticket) -> None:
        """What is computed from now on comes after the copy."""


def copies_for(device: torch.device) -> Copies:
    """The copies for tensors on `device`."""
    return CardCopies(device) if device.type == "cuda" else HostCopies()


@final
class CardCopies(Copies):
    """Copies on two streams of a card."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._to_host = torch.cuda.Stream(device)
        self._to_card = torch.cuda.Stream(device)

    def begin(self, source: torch.Tensor, target: torch.Tensor, *, to_host: bool, held: tuple[Any, ...] = ()) -> Ticket:
        """As in `Copies`: the side stream waits for the computation's."""
        stream = torch.cuda.current_stream(self._device)
        side = self._to_host if to_host else self._to_card
        side.wait_stream(stream)
        with torch.no_grad(), torch.cuda.stream(side):
            target.copy_(source, non_blocking=True)
        return Ticket(is_to_card=not to_host, done=side.record_event(), stream=stream, held=(source, target, *held))

    def wait(self, ticket: Ticket) -> None:
        """As in `Copies`: the streams wait, and the host does not."""
        current = torch.cuda.current_stream(self._device)
        current.wait_event(ticket.done)
        # Memory goes back to the stream that it was allocated on, which may be another than the present one.
        if current != ticket.stream:
            ticket.stream.wait_event(ticket.done)


@final
class HostCopies(Copies):
    """Copies in a thread, from host memory to host memory."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tightfit-copies")
        self._process = os.getpid()

    def begin(self, source: torch.Tensor, target: torch.Tensor, *, to_host: bool, held: tuple[Any, ...] = ()) -> Ticket:
        """As in `Copies`: computation on the host is over when its call returns."""
        if self._process != os.getpid():
            # A fork has no threads but the one that forked.
            self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tightfit-copies")
            self._process = os.getpid()
        done = self._pool.submit(_copy, source, target)
        return Ticket(is_to_card=not to_host, done=(done, self._process), stream=None, held=(source, target, *held))

    def wait(self, ticket: Ticket) -> None:
        """As in `Copies`: the caller waits. An error in the thread is raised here."""
        done: Future[None]
        done, process = ticket.done
        if process == os.getpid():
            done.result()
        else:
            # Begun before a fork: the thread that was to do it is in the other process.
            _copy(*ticket.held[:2])


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    with torch.no_grad():
        target.copy_(source)
