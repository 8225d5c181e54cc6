"""Weights on disk that are trained: memory of a private mapping of our file, which an optimizer updates in place and which is then written to the file.

A page that is written to is the process's own from then on, whatever becomes of the file (mmap(2), MAP_PRIVATE), so memory has the weight at any time. Before an
update all pages of a weight are made the process's own, with the checksum compared; behind it the weight is written, and only when the disk says that it has it
the pages are given back (`MADV_DONTNEED`), and are the file's again. An error or an interrupt anywhere leaves memory as it is, and only more of it is held.
"""

import contextlib
import mmap
import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from concurrent import futures

import torch

from tightfit.engine.copy_engines import CopyEngine, Ticket
from tightfit.engine.disk.disk_copies import OnFailure, VirtualDiskCopies
from tightfit.engine.disk.disk_file import DiskFile
from tightfit.engine.disk.disk_mapping import DiskMapping
from tightfit.engine.disk.disk_places import OnDisk
from tightfit.engine.disk.disk_sizes import PAGE_BYTES, in_pages
from tightfit.engine.disk.disk_slab import DiskSlab
from tightfit.engine.disk.disk_threads import Moving
from tightfit.engine.disk.error_text import error_text
from tightfit.engine.host_slab import host_bytes
from tightfit.engine.weights.not_in_forks import keep_out_of_forks
from tightfit.engine.weights.streamed_weight import Residence, StreamedWeight
from tightfit.engine.weights.weights_in_files import PartOfFile, WeightFiles
from tightfit.errors import ApplyError
from tightfit.tape import CopyDirection


class TrainedFiles:
    """Parts of one file for weights that are trained, moved by `copies`; `on_failure` is told of a disk that does not take them."""

    def __init__(self, slab: DiskSlab, copies: CopyEngine, on_failure: OnFailure) -> None:
        self.slab = slab
        self._copies = copies
        self._on_failure = on_failure
        if isinstance(slab.file, DiskFile):
            slab.file.use_the_cache()
            _check_is_seen(slab, slab.file)
        self._written = WeightFiles(slab, copies)
        self._weights: list[weakref.ref[StreamedWeight]] = []

    def part_of(self, parameter: torch.Tensor) -> PartOfFile:
        """The bytes of its storage, in the file; in a fork the memory is not there.

        Raises:
            ApplyError: the disk fails.
        """
        part = self._written.written(parameter)
        if isinstance(self.slab.file, DiskFile) and part.held is not None:
            self.slab.file.leave_the_cache(part.held.bytes.begin, in_pages(part.held.bytes.num_bytes))
        return part

    def have(self, weights: Iterable[StreamedWeight]) -> None:
        """Leaves the memory of these weights out of forks: one would see there what is written to the file later."""
        if self.slab.mapping is not None:
            self.slab.mapping.keep_out_of_forks()
        for weight in weights:
            self._weights.append(weakref.ref(weight))
            if not self.slab.is_virtual:
                keep_out_of_forks(weight)

    def away(self) -> dict[torch.Tensor, PartOfFile]:
        """Where the parameters are that are in no use, and are what was put there."""
        weights = [weight for known in self._weights if (weight := known()) is not None and weight.is_streamed]
        return {
            weight.parameter: weight.part
            for weight in weights
            if weight.residence is Residence.HOST and isinstance(weight.part, PartOfFile) and weight.is_ours()
        }

    @contextlib.contextmanager
    def updated(self, parts: Sequence[PartOfFile]) -> Iterator[None]:
        """Inside, these weights may be updated in memory; behind, they are on the disk.

        Raises:
            ApplyError: one cannot be read back as it was written.
        """
        # What a program has moved elsewhere is not on disk any more.
        mapping = self.slab.mapping
        assert mapping is not None
        there = [part for part in parts if part.held is not None and mapping.has(part.held.bytes, part.bytes)]
        if isinstance(self._copies, VirtualDiskCopies):
            num_bytes = sum(len(part.bytes) for part in there)
            # The pages that are the process's own.
            held = host_bytes(num_bytes)
            self._copies.move_at_host(CopyDirection.FROM_DISK, num_bytes)
            yield
            self._copies.move_at_host(CopyDirection.TO_DISK, num_bytes)
            del held
            return
        # All pages of them are to be the process's own before the first byte of the file changes.
        for part in there:
            self._move(part.source, part.bytes, part, to_disk=False)
        yield
        self._write(there, mapping)

    def _write(self, parts: Sequence[PartOfFile], mapping: DiskMapping) -> None:
        """Writes weights, all of which are in the process's own memory, and gives that back; keeps it where that fails."""
        written: list[OnDisk] = []
        for part in parts:
            assert part.held is not None
            self._move(part.bytes, part.held.bytes, part, to_disk=True)
            if part.held.bytes.rescued is None:
                written.append(part.held.bytes)
            # In memory it is anyway, and `on_failure` was told.
            part.held.bytes.rescued = None
        file = self.slab.file
        assert isinstance(file, DiskFile)
        try:
            if written:
                file.flush()
            for place in written:
                mapping.forget_written(place)
                file.leave_the_cache(place.begin, in_pages(place.num_bytes))
        except OSError as error:
            self._on_failure(
                f"could not be written to the disk of {file.folder} ({error_text(error)}). They are in host memory instead, and not lost: "
                "save a checkpoint, and choose another folder with --disk-folder, or plan without --disk"
            )

    def _move(self, source: object, target: object, part: PartOfFile, *, to_disk: bool) -> None:
        ticket = self._copies.begin(source, target, to_host=to_disk, held=(part,))
        try:
            self._copies.wait(ticket)
        finally:
            # An interrupt ends the waiting alone: threads are not to write to memory, or to the file, when the program has gone on.
            _finished(ticket)


def _check_is_seen(slab: DiskSlab, file: DiskFile) -> None:
    """Checks that mapped memory has what is written to the file, as the page cache gives it on Linux; POSIX leaves it open.

    Raises:
        ApplyError: it does not.
    """
    if not slab.num_bytes:
        return
    part = slab.take(PAGE_BYTES)
    memory, at = slab.mapped(part), part.bytes.begin
    is_seen = True
    with mmap.mmap(-1, PAGE_BYTES) as page, memoryview(page) as content:
        for byte in (b"\1", b"\2"):
            page[:] = byte * PAGE_BYTES
            file.write(content, at)
            is_seen = is_seen and bool((memory == ord(byte)).all())
    memory.fill_(3)
    is_kept = bool((memory == 3).all())
    assert slab.mapping is not None
    slab.mapping.forget_written(part.bytes)
    if not (is_seen and is_kept and bool((memory == 2).all())):
        raise ApplyError(
            f"the file system of {file.folder} does not show in memory what is written to a file there; choose another folder with --disk-folder, "
            "or plan without weights on disk"
        )


def _finished(ticket: Ticket) -> None:
    if isinstance(ticket.done, Moving) and ticket.done.process == os.getpid():
        futures.wait(ticket.done.pieces)
