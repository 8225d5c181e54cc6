"""Asynchronous collectives that nobody has waited for yet, and the tensors that they hold meanwhile.

`ProcessGroupNCCL` stashes the tensors of a collective until it is waited for, or until its watchdog sees that it is over, and gives them up at the next
collective (`stashed_for_allocator_safety_`, `shelvesToUnstash_`). What the program cannot wait for any more is given up at the next collective here.
"""

import collections
import dataclasses
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch

from tightfit.capture.observe.streams import VirtualEvent

# Programs wait for a few at a time; one that nobody waits for must not hold its tensors for ever.
_MAX_PENDING = 64


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Pending:
    """An asynchronous collective: the event at its end, the tensors that it holds, and what torch returned for it. A functional one returns
    tensors, of which `results` are the storages, and no `work`."""

    event: VirtualEvent
    tensors: tuple[torch.Tensor, ...]
    work: Any = None
    results: tuple[weakref.ref[torch.UntypedStorage], ...] = ()

    @property
    def is_unheld(self) -> bool:
        """Whether the program has dropped what it could wait with."""
        if self.work is not None:
            # One reference is the entry's own, and one the argument of `getrefcount`.
            return sys.getrefcount(self.work) <= 2
        return bool(self.results) and all(result() is None for result in self.results)


class PendingCollectives:
    """The asynchronous collectives of a process, in order."""

    def __init__(self) -> None:
        self._pending: collections.deque[Pending] = collections.deque(maxlen=_MAX_PENDING)

    def add(self, pending: Pending) -> None:
        """Holds the tensors of a collective from now on."""
        self._pending.append(pending)

    def drop_unheld(self) -> None:
        """A collective is called: frees the tensors of those that nobody can wait for any more."""
        for each in [p for p in self._pending if p.is_unheld]:
            self._pending.remove(each)

    def wait_for_work(self, work: Any) -> None:
        """`Work.wait`."""
        self._wait(lambda pending: pending.work is work)

    def wait_for_tensor(self, tensor: torch.Tensor) -> None:
        """`wait_tensor`, of what a functional collective has returned."""
        storage = tensor.untyped_storage()._cdata

        def returned(pending: Pending) -> bool:
            found = (result() for result in pending.results)
            return any(each is not None and each._cdata == storage for each in found)

        self._wait(returned)

    def _wait(self, is_chosen: Callable[[Pending], bool]) -> None:
        for each in [p for p in self._pending if is_chosen(p)]:
            each.event.wait()
            self._pending.remove(each)
