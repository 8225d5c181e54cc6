"""Moves what blocks save for backward to the host while the following block runs, and back one block ahead of the backward pass.

The borders of the blocks' calls are the clock. At the end of a call the storages that it was asked for begin to leave, where nothing else refers to
them, and the others of them (its input) when the next call begins; at the end of that one the computation's stream waits for those copies, and their
memory on the card is free again. In the backward pass the first tensor that is needed of a call brings back what is missing of it, and begins to bring
back the call before it. All of this happens at fixed places of the program, so the memory that is held does not depend on how fast the copies are.
"""

import contextlib
import dataclasses
import functools
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from tightfit.effects.asked_of_saved import question_of
from tightfit.engine.copy_engines import CopyEngine, Ticket, copies_for
from tightfit.engine.descriptors import close_gone
from tightfit.engine.disk.disk_copies import DiskSpace
from tightfit.engine.disk.disk_slab import DiskSlab
from tightfit.engine.host_slab import HostSlab, unregister_gone
from tightfit.engine.saved.saved_storage import Place, Saved, SavedStorage
from tightfit.errors import ApplyError

_BORDERS_TO_TRY = 2
"""At the ends of how many calls a storage is looked at: its block's input and result are let go a little later than the rest."""
_ROUNDING = 1e-3

Check = Callable[[SavedStorage, torch.Tensor], None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which storages of a call move: those of `smallest_bytes` or more, and where `counts` are given, pairs of bytes and a number, so many of each size; to the host,
    or `to_disk`.

    A call that has not saved those, as its batch is another, moves its largest up to the `share` of its bytes instead.
    """

    smallest_bytes: int = 1
    to_disk: bool = False
    counts: tuple[tuple[int, int], ...] = ()
    share: float = 1.0


class BlockCall:
    """What one call of a block saved, in order. Of a call without a `selection` only its border and its place in the order count.

    `previous` is the number of the call that ended before it began, `depth` in how many others it runs, `label` the technique that moves it.
    """

    def __init__(self, number: int, selection: Selection | None, *, previous: int, depth: int, label: str) -> None:
        self.number = number
        self.selection = selection
        self.previous = previous
        self.depth = depth
        self.label = label
        self.to_disk = selection is not None and selection.to_disk
        self.num_borders = 0
        self.is_reached = False
        """Whether the backward pass has come to it."""
        self._storages: list[weakref.ref[SavedStorage]] = []
        # How many of each size may still leave, none before that is settled at the end of the call; None: all.
        self._may_leave: Counter[int] | None = Counter() if selection is not None and selection.counts else None

    def add(self, storage: SavedStorage) -> None:
        """A storage that it is the first to save."""
        self._storages.append(weakref.ref(storage))

    def storages(self, place: Place) -> list[SavedStorage]:
        """Those that are still saved, and are at `place`."""
        living = [storage for reference in self._storages if (storage := reference()) is not None]
        return [storage for storage in living if storage.place is place]

    def select(self) -> bool:
        """Settles which sizes leave, from what the call has saved; whether these are the planned ones."""
        if self.selection is None or not self.selection.counts:
            return True
        there = Counter(storage.num_bytes for storage in self.storages(Place.CARD))
        planned = Counter(dict(self.selection.counts))
        is_as_planned = planned <= there
        self._may_leave = planned if is_as_planned else _largest(there, self.selection.share)
        return is_as_planned

    def may_leave(self, num_bytes: int) -> bool:
        """Whether one more storage of this size is to leave."""
        return self._may_leave is None or self._may_leave[num_bytes] > 0

    def left(self, num_bytes: int) -> None:
        """A storage of this size has left."""
        if self._may_leave is not None:
            self._may_leave[num_bytes] -= 1

    def close(self) -> int:
        """Lets no more leave. How many were to, and have not, as the program itself still had them."""
        if self._may_leave is None:
            return 0
        stayed, self._may_leave = self._may_leave.total(), Counter()
        return stayed

    @property
    def is_over(self) -> bool:
        """Whether nothing is saved of it any more."""
        return all(reference() is None for reference in self._storages)


class Held:
    """A result that is held for a call, to be taken back."""

    def __init__(self, saved: Saved, unpack: Callable[[Saved], torch.Tensor]) -> None:
        self._saved = saved
        self._unpack = unpack

    @property
    def is_written_to(self) -> bool:
        """Whether somebody has written to it since."""
        return self._saved.is_written_to

    def take(self) -> torch.Tensor:
        """The result, on the card."""
        return self._unpack(self._saved)


class SavedTensors:
    """The storages that blocks of one model have saved on `device`; `statistics` counts what is moved.

    They go to the host, or to `disk` in calls that say so. `when_left` and `when_back` are called with each storage and its bytes on the card.
    """

    def __init__(
        self,
        device: torch.device,
        host_bytes: int,
        *,
        statistics: Counter[str],
        disk: DiskSpace | None = None,
        when_left: Check = lambda _storage, _bytes: None,
        when_back: Check = lambda _storage, _bytes: None,
    ) -> None:
        self.slab = HostSlab(host_bytes, device)
        self.disk: DiskSlab | None = None
        self.device = device
        link = copies_for(device)
        self._link = link
        self._copies: CopyEngine = link
        if disk is not None:
            self.add_disk(disk)
        self._statistics = statistics
        self._when_left, self._when_back = when_left, when_back
        self._calls: dict[int, BlockCall] = {}
        self._num_calls = 0
        # The calls that are running, the outermost first, and the number of the last one that is over.
        self._running: list[BlockCall] = []
        self._last_over = 0
        # By address, which another storage has after the first is gone.
        self._storages: dict[int, weakref.ref[SavedStorage]] = {}
        self._leaving: list[SavedStorage] = []
        self._under_way: list[Ticket] = []
        # The backward pass runs in threads of autograd's own.
        self._lock = threading.RLock()
        self.is_on = True
        self.question = ""
        """Where the backward pass of a function asks what a saved tensor is, besides its values (`effects.asked_of_saved`)."""

    @contextmanager
    def call(self, selection: Selection | None, *, label: str = "") -> Iterator[None]:
        """Runs a call of a block; what the `selection` names of all that is saved for backward inside goes to the host afterwards."""
        with self._lock:
            self._num_calls += 1
            call = BlockCall(
                self._num_calls, selection, previous=self._last_over, depth=len(self._running), label=label
            )
            self._calls[call.number] = call
            self._running.append(call)
            # The caller has let go of what it gave to the call before.
            self._begin_to_leave(is_end=False)
        hooks = functools.partial(self._pack, call), functools.partial(self._unpack, call)
        try:
            with torch.autograd.graph.saved_tensors_hooks(*hooks):
                yield
        finally:
            with self._lock:
                self._running.remove(call)
                self._last_over = max(self._last_over, call.number)
        with self._lock:
            self._border(call)

    def hold(self, tensor: torch.Tensor) -> "Held | None":
        """Takes a result that an operator of the running call has made and the call keeps by itself, as if autograd had saved it; None if no call runs."""
        if not self._running:
            return None
        call = self._running[-1]
        return Held(self._pack(call, tensor, is_made=True), functools.partial(self._unpack, call))

    def is_only_border(self, hooks: tuple[Any, Any]) -> bool:
        """Whether these are the hooks of a call of ours that moves nothing, so that one inside of it can have its own."""
        pack = hooks[0]
        return isinstance(pack, functools.partial) and pack.func == self._pack and pack.args[0].selection is None

    def add_host_memory(self, num_bytes: int) -> None:
        """Enlarges the slab, of which nothing may be in use yet.

        Raises:
            ApplyError: the host has too little memory.
        """
        total = self.slab.num_bytes + num_bytes
        # Given back first: both at once would be more than was planned.
        del self.slab
        self.slab = HostSlab(total, self.device)

    def add_disk(self, disk: DiskSpace) -> None:
        """Opens the file for calls that move to disk.

        Raises:
            ApplyError: the disk has too little space.
        """
        self.disk, self._copies = disk.opened(self.device, self._link)

    def end(self) -> None:
        """Moves nothing more to the host. What is there comes back when it is needed."""
        with self._lock:
            self.is_on = False
            self._let_go()
        unregister_gone()
        close_gone()

    def _pack(self, call: BlockCall, tensor: torch.Tensor, *, is_made: bool = False) -> Saved:
        self.question = self.question or question_of(sys._getframe(1))
        storage = self._storage_of(call, tensor, is_made=is_made) if self.is_on else None
        saved = Saved(tensor, storage)
        if storage is not None:
            storage.saved.append(weakref.ref(saved))
        return saved

    def _storage_of(self, call: BlockCall, tensor: torch.Tensor, *, is_made: bool) -> SavedStorage | None:
        """The storage of `tensor`; None if it stays where it is: what no node has made is a weight, a buffer or a batch, and not of the block, unless it
        `is_made` by an operator of the block."""
        selection = call.selection
        if selection is None or tensor.device != self.device or not _is_plain(tensor):
            return None
        if not is_made and _is_made_by_none(tensor):
            return None
        storage = tensor.untyped_storage()
        num_bytes, key = storage.nbytes(), storage._cdata
        if num_bytes < selection.smallest_bytes or num_bytes % tensor.element_size():
            return None
        with self._lock:
            reference = self._storages.get(key)
            known = None if reference is None else reference()
            if known is None or known.place is not Place.CARD or not known.living():
                known = SavedStorage(num_bytes=num_bytes, call=call)
                self._storages[key] = weakref.ref(known)
                call.add(known)
            return known

    def _unpack(self, call: BlockCall, saved: Saved) -> torch.Tensor:
        saved.check()
        if not call.is_reached:
            with self._lock:
                self._reach(call)
        if saved.tensor is not None:
            return saved.tensor
        storage = saved.storage
        assert storage is not None
        with self._lock:
            self._have(storage)
            assert storage.on_card is not None
            return saved.of(storage.on_card)

    def _border(self, ended: BlockCall) -> None:
        """The end of a call: what left before is dropped from the card, what it saved begins to leave."""
        self._let_go(ended)
        # No weak dictionary, whose callbacks are code in which an interrupt could be lost.
        self._storages = {key: reference for key, reference in self._storages.items() if reference() is not None}
        for number in [n for n, call in self._calls.items() if call.num_borders > _BORDERS_TO_TRY and call.is_over]:
            del self._calls[number]
        if not ended.select():
            self._statistics["calls unlike the plan"] += 1
        self._begin_to_leave(is_end=True)

    def _begin_to_leave(self, *, is_end: bool) -> None:
        """Copies what is to leave of the last calls, where nothing else refers to it any more."""
        for call in reversed(self._calls.values()):
            # Of a call that runs nothing has been settled.
            if call in self._running:
                continue
            call.num_borders += is_end
            # When a call begins only the one before it is looked at.
            if call.num_borders > _BORDERS_TO_TRY - (not is_end):
                self._close(call)
                break
            for storage in call.storages(Place.CARD):
                is_wanted = self.is_on and not call.is_reached and call.may_leave(storage.num_bytes)
                if is_wanted and storage.is_ours_alone():
                    self._leave(storage)
                    call.left(storage.num_bytes)

    def _close(self, call: BlockCall) -> None:
        stayed = call.close()
        if stayed:
            self._statistics["storages that stayed"] += stayed

    def _let_go(self, ended: BlockCall | None = None) -> None:
        """Waits for what is under way, and drops what has arrived at the host from the card: of calls that were over when `ended` began, beside it or
        deeper inside of others; without it, of all."""
        going = [storage for storage in self._leaving if ended is None or _is_before(storage.call, ended)]
        tickets = {id(storage.ticket) for storage in going}
        is_all = len(going) == len(self._leaving)
        for ticket in [each for each in reversed(self._under_way) if is_all or id(each) in tickets]:
            # What cannot be read back from disk is an error where it is needed.
            with contextlib.suppress(ApplyError):
                self._copies.wait(ticket)
            # Removed afterwards: an interrupt in between waits twice.
            self._under_way.remove(ticket)
        for storage in going:
            if storage.place is Place.LEAVING:
                storage.on_card, storage.ticket, storage.place = None, None, Place.HOST
        self._leaving = [
            storage for storage in self._leaving if ended is not None and not _is_before(storage.call, ended)
        ]

    def _leave(self, storage: SavedStorage) -> None:
        whole = storage.bytes_on_card()
        self._when_left(storage, whole)
        slab = self.slab if self.disk is None or not storage.call.to_disk else self.disk
        storage.part = slab.take(storage.num_bytes)
        ticket = self._copies.begin(whole, storage.part.bytes, to_host=True, held=(storage.part,))
        self._under_way.append(ticket)
        storage.on_card, storage.ticket, storage.place = whole, ticket, Place.LEAVING
        for saved in storage.living():
            saved.leave()
        self._leaving.append(storage)
        self._statistics["offloaded storages"] += 1
        self._statistics["offloaded bytes"] += storage.num_bytes

    def _reach(self, call: BlockCall) -> None:
        """The backward pass has come to `call`: brings back what is missing of it, and begins to with the call before it."""
        call.is_reached = True
        self._close(call)
        # What was about to leave is needed soon: it stays.
        for storage in self._leaving:
            if storage.place is Place.LEAVING:
                storage.place, storage.part = Place.BACK, None
        self._leaving.clear()
        for ticket in [ticket for ticket in self._under_way if not ticket.is_to_card]:
            self._copies.wait(ticket)
            self._under_way.remove(ticket)
        for number in (call.number, call.previous):
            if number in self._calls:
                for storage in self._calls[number].storages(Place.HOST):
                    self._fetch(storage)

    def _have(self, storage: SavedStorage) -> None:
        """Has `storage` on the card, for what is computed from now on."""
        if storage.place is Place.HOST:
            # Out of order: a backward pass that does not come from the end.
            self._fetch(storage)
        if storage.place is Place.LEAVING:
            storage.place = Place.BACK
        if storage.place is Place.COMING:
            assert storage.ticket is not None and storage.on_card is not None
            self._arrive(storage.ticket)
            # Of its host memory nothing is needed any more: the graph has it on the card until it is freed.
            storage.ticket, storage.part, storage.place = None, None, Place.BACK
            self._when_back(storage, storage.on_card)

    def _arrive(self, ticket: Ticket) -> None:
        """Waits for one copy; those in order that were begun before it in the same direction are over then."""
        self._copies.wait(ticket)
        if ticket in self._under_way:
            at = self._under_way.index(ticket)
            before = self._under_way[:at]
            if ticket.is_in_order:
                before = [other for other in before if not (other.is_to_card and other.is_in_order)]
            self._under_way = before + self._under_way[at + 1 :]

    def _fetch(self, storage: SavedStorage) -> None:
        assert storage.part is not None
        with torch.no_grad():
            storage.on_card = torch.empty(storage.num_bytes, dtype=torch.uint8, device=self.device)
        storage.ticket = self._copies.begin(storage.part.bytes, storage.on_card, to_host=False, held=(storage.part,))
        # Kept until it is waited for, also where the storage itself is not needed any more: memory that is freed before
        # is used by the computation while the copy still writes to it.
        self._under_way.append(storage.ticket)
        storage.place = Place.COMING


def _is_before(call: BlockCall, ended: BlockCall) -> bool:
    return call.number < ended.number and call.depth >= ended.depth


def _largest(there: Counter[int], share: float) -> Counter[int]:
    """How many of each size to take of `there`, sizes in bytes with their numbers: the largest first, up to the `share` of all."""
    # What a share was rounded by.
    left = int(share * sum(size * number for size, number in there.items()) * (1 + _ROUNDING))
    taken: Counter[int] = Counter()
    for size in sorted(there, reverse=True):
        taken[size] = min(there[size], left // size)
        left -= taken[size] * size
    return taken


def _is_made_by_none(tensor: torch.Tensor) -> bool:
    """Whether no node has made the tensor, or what it is a view of (`weight.t()`)."""
    base = tensor._base
    return tensor.grad_fn is None or (base is not None and base.grad_fn is None)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a view of one storage and nothing else; on the virtual GPU tensors are fake."""
    return (
        type(tensor) in (torch.Tensor, FakeTensor)
        and tensor.layout == torch.strided
        and not tensor.is_nested
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.is_inference()
        and not tensor._is_zerotensor()
    )
