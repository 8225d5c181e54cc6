"""Moves what blocks save for backward to the host while the following block runs, and back one block ahead of the backward pass.

The borders of the blocks' calls are the clock. At the end of a call its storages begin to leave, where nothing else refers to them; at the next border
the computation's stream waits for those copies, and their memory on the card is free again. In the backward pass the first tensor that is needed of a
call brings back what is missing of it, and begins to bring back the call before it. All of this happens at fixed places of the program, so the memory
that is held does not depend on how fast the copies are.
"""

import functools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from tightfit.engine.copies import Copies, Ticket, copies_for
from tightfit.engine.host_slab import HostSlab, unregister_gone
from tightfit.engine.saved_storage import Place, Saved, SavedStorage

_BORDERS_TO_TRY = 2
"""At how many borders a storage is looked at: its block's result is let go a little later than the rest."""

Check = Callable[[SavedStorage, torch.Tensor], None]


class BlockCall:
    """What one call of a block saved, in order. Of a call that `moves` nothing only its border and its place in the order count."""

    def __init__(self, number: int, *, moves: bool) -> None:
        self.number = number
        self.moves = moves
        self.num_borders = 0
        self.is_reached = False
        """Whether the backward pass has come to it."""
        self._storages: list[weakref.ref[SavedStorage]] = []

    def add(self, storage: SavedStorage) -> None:
        """A storage that it is the first to save."""
        self._storages.append(weakref.ref(storage))

    def storages(self, place: Place) -> list[SavedStorage]:
        """Those that are still saved, and are at `place`."""
        living = [storage for reference in self._storages if (storage := reference()) is not None]
        return [storage for storage in living if storage.place is place]

    @property
    def is_over(self) -> bool:
        """Whether nothing is saved of it any more."""
        return all(reference() is None for reference in self._storages)


class SavedTensors:
    """The storages that blocks of one model have saved on `device`, of `smallest_bytes` or more each; `statistics` counts what is moved.

    `when_left` and `when_back` are called with each storage and its bytes on the card.
    """

    def __init__(
        self,
        device: torch.device,
        host_bytes: int,
        *,
        smallest_bytes: int,
        statistics: Counter[str],
        when_left: Check = lambda _storage, _bytes: None,
        when_back: Check = lambda _storage, _bytes: None,
    ) -> None:
        self.slab = HostSlab(host_bytes, device)
        self._device = device
        self._copies: Copies = copies_for(device)
        self._smallest_bytes = smallest_bytes
        self._statistics = statistics
        self._when_left, self._when_back = when_left, when_back
        self._calls: dict[int, BlockCall] = {}
        self._num_calls = 0
        # By address, which another storage has after the first is gone.
        self._storages: dict[int, weakref.ref[SavedStorage]] = {}
        self._leaving: list[SavedStorage] = []
        self._under_way: list[Ticket] = []
        # The backward pass runs in threads of autograd's own.
        self._lock = threading.RLock()
        self.is_on = True

    @contextmanager
    def call(self, *, moves: bool = True) -> Iterator[None]:
        """Runs a call of a block: with `moves`, what is saved for backward inside goes to the host afterwards."""
        with self._lock:
            self._num_calls += 1
            call = BlockCall(self._num_calls, moves=moves)
            self._calls[call.number] = call
        hooks = functools.partial(self._pack, call), functools.partial(self._unpack, call)
        with torch.autograd.graph.saved_tensors_hooks(*hooks):
            yield
        with self._lock:
            self._border()

    def end(self) -> None:
        """Moves nothing more to the host. What is there comes back when it is needed."""
        with self._lock:
            self.is_on = False
            self._let_go()
        unregister_gone()

    def _pack(self, call: BlockCall, tensor: torch.Tensor) -> Saved:
        storage = self._storage_of(call, tensor) if call.moves and self.is_on else None
        saved = Saved(tensor, storage)
        if storage is not None:
            storage.saved.append(weakref.ref(saved))
        return saved

    def _storage_of(self, call: BlockCall, tensor: torch.Tensor) -> SavedStorage | None:
        """The storage of `tensor`; None if it stays where it is: what no node has made is a weight, a buffer or a batch, and not of the block."""
        if tensor.grad_fn is None or tensor.device != self._device or not _is_plain(tensor):
            return None
        storage = tensor.untyped_storage()
        num_bytes, key = storage.nbytes(), storage._cdata
        if num_bytes < self._smallest_bytes or num_bytes % tensor.element_size():
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

    def _border(self) -> None:
        """The end of a call: what left before is dropped from the card, what it saved begins to leave."""
        self._let_go()
        # No weak dictionary, whose callbacks are code in which an interrupt could be lost.
        self._storages = {key: reference for key, reference in self._storages.items() if reference() is not None}
        for number in [n for n, call in self._calls.items() if call.num_borders > _BORDERS_TO_TRY and call.is_over]:
            del self._calls[number]
        for call in reversed(self._calls.values()):
            call.num_borders += 1
            if call.num_borders > _BORDERS_TO_TRY:
                break
            for storage in call.storages(Place.CARD):
                if self.is_on and not call.is_reached and storage.is_ours_alone():
                    self._leave(storage)

    def _let_go(self) -> None:
        """Waits for what is under way, and drops what has arrived at the host from the card."""
        while self._under_way:
            # Removed afterwards: an interrupt in between waits twice.
            self._copies.wait(self._under_way[-1])
            self._under_way.pop()
        for storage in self._leaving:
            if storage.place is Place.LEAVING:
                storage.on_card, storage.ticket, storage.place = None, None, Place.HOST
        self._leaving.clear()

    def _leave(self, storage: SavedStorage) -> None:
        whole = storage.bytes_on_card()
        self._when_left(storage, whole)
        storage.part = self.slab.take(storage.num_bytes)
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
        # What was about to leave is needed soon: it stays.
        for storage in self._leaving:
            if storage.place is Place.LEAVING:
                storage.place, storage.part = Place.BACK, None
        self._leaving.clear()
        for ticket in [ticket for ticket in self._under_way if not ticket.is_to_card]:
            self._copies.wait(ticket)
            self._under_way.remove(ticket)
        for number in (call.number, call.number - 1):
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
        """Waits for one copy; those that were begun before it in the same direction are over then."""
        self._copies.wait(ticket)
        if ticket in self._under_way:
            at = self._under_way.index(ticket)
            self._under_way = [other for other in self._under_way[:at] if not other.is_to_card] + self._under_way[
                at + 1 :
            ]

    def _fetch(self, storage: SavedStorage) -> None:
        assert storage.part is not None
        with torch.no_grad():
            storage.on_card = torch.empty(storage.num_bytes, dtype=torch.uint8, device=self._device)
        storage.ticket = self._copies.begin(storage.part.bytes, storage.on_card, to_host=False, held=(storage.part,))
        # Kept until it is waited for, also where the storage itself is not needed any more: memory that is freed before
        # is used by the computation while the copy still writes to it.
        self._under_way.append(storage.ticket)
        storage.place = Place.COMING


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a view of one storage and nothing else."""
    return (
        tensor.layout == torch.strided
        and not tensor.is_nested
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.is_inference()
        and not tensor._is_zerotensor()
        and not torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor)
    )
