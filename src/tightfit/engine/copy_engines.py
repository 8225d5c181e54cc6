"""Copies between a card and the host that run beside the computation.

On a card there is one stream to the host and one back, created once: new streams in each step would be new pools of the caching allocator. Order is
kept by events alone and by references that are held until a copy is over; `record_stream` is not used, since it delays reuse until a side stream is
drained. Without a card a thread copies, and the rest is the same code.
"""

import abc
import dataclasses
import os
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, final

import torch


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ticket:
    """A copy that was begun. `done` is its event or future, `stream` the computation's stream at the time, `held` what must live until it is over.

    `is_in_order`: it is over no earlier than those in its direction that were begun before it.
    """

    is_to_card: bool
    done: Any
    stream: Any
    held: tuple[Any, ...]
    is_in_order: bool = True


class CopyEngine(abc.ABC):
    """Copies in both directions beside the computation."""

    @abc.abstractmethod
    def begin(self, source: Any, target: Any, *, to_host: bool, held: tuple[Any, ...] = ()) -> Ticket:
        """Begins a copy of `source`, as the computation has left it by now, to `target`; `held` is kept alive until it is waited for.

        Both are tensors, or the one that is not on the card is a place on disk.
        """

    @abc.abstractmethod
    def wait(self, ticket: Ticket) -> None:
        """What is computed from now on comes after the copy."""

    @abc.abstractmethod
    def finish(self, ticket: Ticket) -> None:
        """Waits on the host until the copy is over, and with it those that were begun before in its direction."""

    @abc.abstractmethod
    def is_of_present_stream(self, ticket: Ticket) -> bool:
        """Whether a copy was begun on the stream that computes now."""


class Link(CopyEngine):
    """Copies between a card and the host, each in the order in which they are begun; a thread beside the program's may make some by itself."""

    @abc.abstractmethod
    def mark(self) -> Any:
        """The present place in the computation, for `move`."""

    @abc.abstractmethod
    def move(self, source: torch.Tensor, target: torch.Tensor, *, to_host: bool, after: Any) -> None:
        """Copies `source`, as the computation has left it at the place `after`, to `target`, and returns when that is done; from any thread."""


def copies_for(device: torch.device) -> Link:
    """The copies for tensors on `device`."""
    return CardCopies(device) if device.type == "cuda" else HostCopies()


@final
class CardCopies(Link):
    """Copies on two streams of a card."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._to_host = torch.cuda.Stream(device)
        self._to_card = torch.cuda.Stream(device)

    def begin(self, source: torch.Tensor, target: torch.Tensor, *, to_host: bool, held: tuple[Any, ...] = ()) -> Ticket:
        """As in `CopyEngine`: the side stream waits for the computation's."""
        stream = torch.cuda.current_stream(self._device)
        side = self._to_host if to_host else self._to_card
        side.wait_stream(stream)
        with torch.no_grad(), torch.cuda.stream(side):
            target.copy_(source, non_blocking=True)
        return Ticket(is_to_card=not to_host, done=side.record_event(), stream=stream, held=(source, target, *held))

    def wait(self, ticket: Ticket) -> None:
        """As in `CopyEngine`: the streams wait, and the host does not."""
        current = torch.cuda.current_stream(self._device)
        current.wait_event(ticket.done)
        # Memory goes back to the stream that it was allocated on, which may be another than the present one.
        if current != ticket.stream:
            ticket.stream.wait_event(ticket.done)

    def mark(self) -> Any:
        """As in `Link`: an event on the computation's stream."""
        return torch.cuda.current_stream(self._device).record_event()

    def move(self, source: torch.Tensor, target: torch.Tensor, *, to_host: bool, after: Any) -> None:
        """As in `Link`: the thread waits, and no stream does."""
        side = self._to_host if to_host else self._to_card
        side.wait_event(after)
        with torch.no_grad(), torch.cuda.stream(side):
            target.copy_(source, non_blocking=True)
        side.record_event().synchronize()

    def finish(self, ticket: Ticket) -> None:
        """As in `CopyEngine`."""
        ticket.done.synchronize()

    def is_of_present_stream(self, ticket: Ticket) -> bool:
        """As in `CopyEngine`."""
        return bool(torch.cuda.current_stream(self._device) == ticket.stream)


@final
class HostCopies(Link):
    """Copies in a thread, from host memory to host memory."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tightfit-copies")
        self._process = os.getpid()

    def begin(self, source: torch.Tensor, target: torch.Tensor, *, to_host: bool, held: tuple[Any, ...] = ()) -> Ticket:
        """As in `CopyEngine`: computation on the host is over when its call returns."""
        if self._process != os.getpid():
            # A fork has no threads but the one that forked.
            self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tightfit-copies")
            self._process = os.getpid()
        return Ticket(
            is_to_card=not to_host,
            done=(submitted(self._pool, _copy_given, [source, target]), self._process),
            stream=None,
            held=(source, target, *held),
        )

    def wait(self, ticket: Ticket) -> None:
        """As in `CopyEngine`: the caller waits, and copies itself what the thread has not. An error of that is raised here."""
        done: Future[None]
        done, process = ticket.done
        # Begun before a fork, the thread that was to do it is in the other process.
        if process != os.getpid() or not _is_done(done):
            _copy(*ticket.held[:2])

    def mark(self) -> Any:
        """As in `Link`: nothing, as computation on the host is over when its call returns."""
        return None

    def move(self, source: torch.Tensor, target: torch.Tensor, *, to_host: bool, after: Any) -> None:
        """As in `Link`."""
        _copy(source, target)

    def finish(self, ticket: Ticket) -> None:
        """As in `CopyEngine`: there is one thread for both directions."""
        self.wait(ticket)

    def is_of_present_stream(self, ticket: Ticket) -> bool:
        """As in `CopyEngine`: the host has one."""
        return True


def submitted(pool: ThreadPoolExecutor, work: Callable[..., None], *arguments: Any) -> Future[None]:
    """What `pool` will have done; it has failed where no thread can be started, or the interpreter is ending, and whoever waits does the work."""
    try:
        return pool.submit(work, *arguments)
    except RuntimeError as error:
        failed: Future[None] = Future()
        # Its frames refer to what was to be copied, and to what is returned.
        failed.set_exception(error.with_traceback(None))
        return failed


def _is_done(done: Future[None]) -> bool:
    """Waits for a thread; whether it has done what it was to do."""
    futures.wait([done])
    return not done.cancelled() and done.exception() is None


def _copy_given(given: list[torch.Tensor]) -> None:
    # The thread has no name for them any more when it says that it is done: whether others refer to a tensor is asked then.
    (source, target), given[:] = given, []
    _copy(source, target)


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    with torch.no_grad():
        target.copy_(source)
