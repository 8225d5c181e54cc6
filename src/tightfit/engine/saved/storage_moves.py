"""Copies of saved storages to the host or to disk and back: which are under way, and where their bytes are."""

import contextlib
from collections import Counter
from collections.abc import Callable

import torch

from tightfit.engine.copy_engines import CopyEngine, Ticket, copies_for
from tightfit.engine.disk.disk_copies import DiskSpace
from tightfit.engine.disk.disk_slab import DiskSlab
from tightfit.engine.host_slab import HostSlab
from tightfit.engine.saved.block_call import BlockCall
from tightfit.engine.saved.saved_storage import Place, SavedStorage
from tightfit.errors import ApplyError

Check = Callable[[SavedStorage, torch.Tensor], None]


class StorageMoves:
    """Moves storages between `device` and a slab of `host_bytes` at the host, or a slab on disk. Called under the lock of `SavedTensors`, which says what
    `statistics`, `when_left` and `when_back` are."""

    def __init__(
        self, device: torch.device, host_bytes: int, *, statistics: Counter[str], when_left: Check, when_back: Check
    ) -> None:
        self.slab = HostSlab(host_bytes, device)
        self.disk: DiskSlab | None = None
        self._device = device
        link = copies_for(device)
        self._link = link
        self._copies: CopyEngine = link
        self._statistics = statistics
        self._when_left, self._when_back = when_left, when_back
        self._leaving: list[SavedStorage] = []
        self._under_way: list[Ticket] = []

    def add_host_memory(self, num_bytes: int) -> None:
        """Enlarges the slab, of which nothing may be in use yet.

        Raises:
            ApplyError: the host has too little memory.
        """
        total = self.slab.num_bytes + num_bytes
        # Given back first: both at once would be more than was planned.
        del self.slab
        self.slab = HostSlab(total, self._device)

    def add_disk(self, disk: DiskSpace) -> None:
        """Opens the file for calls that move to disk.

        Raises:
            ApplyError: the disk has too little space.
        """
        self.disk, self._copies = disk.opened(self._device, self._link)

    def leave(self, storage: SavedStorage) -> None:
        """Begins to copy a storage that nothing else refers to; its saved tensors let go of it."""
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

    def let_go(self, ended: BlockCall | None = None) -> None:
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

    def stay(self) -> None:
        """What is about to leave stays on the card."""
        for storage in self._leaving:
            if storage.place is Place.LEAVING:
                storage.place, storage.part = Place.BACK, None
        self._leaving.clear()
        for ticket in [ticket for ticket in self._under_way if not ticket.is_to_card]:
            self._copies.wait(ticket)
            self._under_way.remove(ticket)

    def have(self, storage: SavedStorage) -> None:
        """Has `storage` on the card, for what is computed from now on."""
        if storage.place is Place.HOST:
            # Out of order: a backward pass that does not come from the end.
            self.fetch(storage)
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

    def fetch(self, storage: SavedStorage) -> None:
        """Begins to bring a storage back."""
        assert storage.part is not None
        with torch.no_grad():
            storage.on_card = torch.empty(storage.num_bytes, dtype=torch.uint8, device=self._device)
        storage.ticket = self._copies.begin(storage.part.bytes, storage.on_card, to_host=False, held=(storage.part,))
        # Kept until it is waited for, also where the storage itself is not needed any more: memory that is freed before
        # is used by the computation while the copy still writes to it.
        self._under_way.append(storage.ticket)
        storage.place = Place.COMING


def _is_before(call: BlockCall, ended: BlockCall) -> bool:
    return call.number < ended.number and call.depth >= ended.depth
