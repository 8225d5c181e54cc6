"""A file on disk from which parts are handed out, as `HostSlab` does of host memory, and the few buffers of host memory through which they are moved.

The file has exactly the bytes that a plan says, allocated before the first step. What is larger than planned makes it grow. A part that is written once can
be mapped: it is memory of the program then, of which the system keeps what there is room for.
"""

import dataclasses
import os
import weakref
from collections import deque
from typing import TYPE_CHECKING

import torch

from tightfit.capture.processes.process_role import is_simulated
from tightfit.engine.disk.disk_file import DiskFile
from tightfit.engine.disk.disk_mapping import DiskMapping
from tightfit.engine.disk.disk_places import HostBuffer, OnDisk
from tightfit.engine.disk.disk_sizes import PAGE_BYTES, in_pages, num_buffers_of, piece_bytes_of
from tightfit.engine.disk.error_text import error_text
from tightfit.engine.free_ranges import FreeRanges
from tightfit.engine.host_slab import HostSlab, host_bytes
from tightfit.errors import ApplyError

if TYPE_CHECKING:
    from tightfit.capture.observe.disk_traffic import VirtualFile


@dataclasses.dataclass(slots=True, kw_only=True, weakref_slot=True, eq=False)
class DiskPart:
    """A part of a file, as `Part` is one of host memory: it is given back when this object is gone."""

    bytes: OnDisk
    slab: "DiskSlab"


class DiskSlab:
    """`num_bytes` on the disk of `folder`, by default TMPDIR, and `buffer_bytes` of host memory, for tensors on `near`.

    Raises:
        ApplyError: the disk or the host has too little space, or the folder is not on a disk.
    """

    def __init__(self, num_bytes: int, buffer_bytes: int, near: torch.device, folder: str | None = None) -> None:
        self.is_virtual = is_simulated() and near.type == "cuda"
        self.file = self._new_file(num_bytes, folder)
        self._free = FreeRanges(self.file.num_bytes, alignment=PAGE_BYTES)
        # References to parts that are gone, which may be at any time and in any thread; and where each part is.
        self._returned: deque[weakref.ref[DiskPart]] = deque()
        self._handed_out: dict[weakref.ref[DiskPart], tuple[int, int]] = {}
        # A page to move, and one to begin at a page.
        self.memory = HostSlab(max(buffer_bytes, 2 * PAGE_BYTES), near)
        self.host_part = self.memory.take(self.memory.num_bytes)
        self._process = os.getpid()
        self.mapping: DiskMapping | None = None
        """What was mapped last."""

    def take(self, num_bytes: int) -> DiskPart:
        """A part of `num_bytes`; the file grows if no free range is large enough.

        Raises:
            ApplyError: the disk is full.
        """
        while self._returned:
            self._free.give_back(*self._handed_out.pop(self._returned.popleft()))
        if self._process != os.getpid():
            # The file from before the fork is the other process's too, and is only read here.
            folder = self.file.folder if isinstance(self.file, DiskFile) else None
            self.file, self._process = self._new_file(self.file.num_bytes, folder), os.getpid()
        place = self._free.take(num_bytes)
        if place is None:
            end = self.file.num_bytes
            self.file.extend(self._free.rounded(num_bytes))
            self._free.give_back(end, self.file.num_bytes)
            place = self._free.take(num_bytes)
            assert place is not None
        part = DiskPart(bytes=OnDisk(file=self.file, begin=place[0], num_bytes=num_bytes), slab=self)
        # At its death the reference is appended to `_returned`, in C: in a callback of Python's an interrupt could be lost.
        note_death = self._returned.append
        self._handed_out[weakref.ref(part, note_death)] = place
        return part

    def take_or_keep(self, num_bytes: int) -> DiskPart:
        """A part as `take` hands it out, or one that is in host memory where the disk is full, for what must not be lost."""
        try:
            return self.take(num_bytes)
        except ApplyError as error:
            why = error_text(error.__cause__ or error)
            place = OnDisk(file=self.file, begin=0, num_bytes=num_bytes, rescued=host_bytes(num_bytes), why_at_host=why)
            return DiskPart(bytes=place, slab=self)

    def mapped(self, part: DiskPart) -> torch.Tensor:
        """A part that has been written, and will not be again, as memory; uint8, of shape (num_bytes,). What is written there does not go to the file."""
        if self.mapping is None or len(self.mapping) < part.bytes.begin + part.bytes.num_bytes:
            self.mapping = DiskMapping(self.file, is_virtual=self.is_virtual)
        return self.mapping.memory_of(part.bytes)

    @property
    def num_bytes(self) -> int:
        """The size of the file."""
        return self.file.num_bytes

    @property
    def is_registered(self) -> bool:
        """Whether its host memory is page-locked."""
        return self.memory.is_registered

    @property
    def goes_through_the_cache(self) -> bool:
        """Whether what is moved is kept in the system's page cache as well."""
        return isinstance(self.file, DiskFile) and not self.file.is_direct and not self.file.leaves_the_cache

    @property
    def free_bytes(self) -> int:
        """What is not handed out."""
        while self._returned:
            self._free.give_back(*self._handed_out.pop(self._returned.popleft()))
        return self._free.num_bytes

    def buffers(self) -> list[HostBuffer]:
        """The host memory in pieces, each of which begins at a page."""
        whole = self.host_part.bytes
        size = piece_bytes_of(len(whole))
        pieces = whole[-whole.data_ptr() % PAGE_BYTES :].split(size)[: num_buffers_of(len(whole))]
        return [HostBuffer(bytes=piece, memory=piece.numpy().data) for piece in pieces]

    def _new_file(self, num_bytes: int, folder: str | None) -> "DiskFile | VirtualFile":
        if not self.is_virtual:
            return DiskFile(num_bytes, folder)
        # Only now: a user's process has no tape.
        from tightfit.capture.observe.disk_traffic import VirtualFile

        file = VirtualFile()
        file.extend(in_pages(num_bytes))
        return file
