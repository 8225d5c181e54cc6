"""Copies between a card and the disk, beside the computation: threads move pieces through buffers of host memory, with a checksum of each.

A storage stays on the card until all of it is on the disk. So it is not lost where a write fails: it is copied to host memory instead, the step goes
on, and `on_failure` is told. A disk that fails may lose what it has reported as written before: of a direct write of which a part fails, ext4 writes the rest
through the page cache, and reports it as written whatever becomes of it (`ext4_dio_write_iter`, fs/ext4/file.c of Linux). What does not come back as it was written is an error before anybody has seen a value of it.

On the virtual GPU there is neither file nor thread: a stream of the disk's own has what is moved, and the computation waits for its events.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, final

import torch

from tightfit.engine.copy_engines import CopyEngine, Link, Ticket
from tightfit.engine.disk.disk_file import DiskFile
from tightfit.engine.disk.disk_places import DiskPlace, OnDisk
from tightfit.engine.disk.disk_slab import DiskSlab
from tightfit.engine.disk.disk_threads import DiskThreads, Moving
from tightfit.engine.disk.error_text import error_text
from tightfit.engine.host_slab import host_bytes
from tightfit.errors import ApplyError
from tightfit.tape import CopyDirection

OnFailure = Callable[[str], ApplyError]
"""Is told what went wrong, and returns the error to raise where nothing else can be done."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DiskSpace:
    """What is to be had on the disk of `folder`, by default TMPDIR, and the host memory through which it is moved.

    `lost` ends the message of `on_failure` where something cannot be read back: what is lost with it, and what to do.
    """

    num_bytes: int
    buffer_bytes: int
    folder: str | None
    on_failure: OnFailure
    lost: str = ""

    def opened(self, near: torch.device, link: Link) -> tuple[DiskSlab, CopyEngine]:
        """A file for what is on `near`, and the copies to and from it, and those of `link` besides.

        Raises:
            ApplyError: the disk or the host has too little space, or the folder is not on a disk.
        """
        slab = DiskSlab(self.num_bytes, self.buffer_bytes, near, self.folder)
        return slab, VirtualDiskCopies(slab, link) if slab.is_virtual else DiskCopies(
            slab, link, self.on_failure, self.lost
        )


@final
class DiskCopies(CopyEngine):
    """Copies by threads."""

    def __init__(self, slab: DiskSlab, link: Link, on_failure: OnFailure, lost: str) -> None:
        self._link = link
        self._on_failure = on_failure
        self._lost = lost
        self._folder = slab.file.folder if isinstance(slab.file, DiskFile) else ""
        self._threads = DiskThreads(slab.buffers(), link)

    def begin(self, source: Any, target: Any, *, to_host: bool, held: tuple[Any, ...] = ()) -> Ticket:
        """As in `CopyEngine`; `source` or `target` may be a place on disk, the other one is on the card then."""
        there = target if to_host else source
        if not isinstance(there, DiskPlace):
            return self._link.begin(source, target, to_host=to_host, held=held)
        if not to_host and isinstance(there, OnDisk):
            self._finish(there)
            if there.rescued is not None:
                return self._link.begin(there.rescued, target, to_host=False, held=held)
        if to_host and isinstance(there, OnDisk) and there.rescued is not None:
            self._tell(there.why_at_host)
            return self._link.begin(source, there.rescued, to_host=True, held=held)
        tensor = source if to_host else target
        moving = self._threads.move(tensor, there, to_disk=to_host, held=held)
        if isinstance(there, OnDisk) and to_host:
            there.writing = moving
        return Ticket(is_to_card=not to_host, done=moving, stream=None, held=(tensor, there, *held), is_in_order=False)

    def wait(self, ticket: Ticket) -> None:
        """As in `CopyEngine`: the caller waits.

        Raises:
            ApplyError: what was kept on disk cannot be read back as it was.
        """
        moving = ticket.done
        if not isinstance(moving, Moving):
            self._link.wait(ticket)
        elif isinstance(moving.there, OnDisk) and moving.to_disk:
            self._finish(moving.there)
        else:
            error = self._threads.error_of(moving) and self._threads.read_here(moving)
            if error is not None:
                raise self._on_failure(
                    f"could not be read back from the disk of {self._folder} as they were written ({error_text(error)}){self._lost}"
                ) from error

    def finish(self, ticket: Ticket) -> None:
        """As in `CopyEngine`."""
        if isinstance(ticket.done, Moving):
            self.wait(ticket)
        else:
            self._link.finish(ticket)

    def is_of_present_stream(self, ticket: Ticket) -> bool:
        """As in `CopyEngine`: threads that move pieces belong to no stream."""
        return isinstance(ticket.done, Moving) or self._link.is_of_present_stream(ticket)

    def _finish(self, there: OnDisk) -> None:
        """Waits until `there` is written; where it cannot be, it is copied to host memory."""
        moving = there.writing
        if moving is None:
            return
        error = self._threads.error_of(moving)
        if error is not None:
            there.rescued = host_bytes(there.num_bytes)
            self._link.move(moving.tensor, there.rescued, to_host=True, after=self._link.mark())
            self._tell(error_text(error))
        there.writing = None

    def _tell(self, why: str) -> None:
        self._on_failure(
            f"could not be written to the disk of {self._folder} ({why}). They are in host memory instead, and not lost: "
            "save a checkpoint, and choose another folder with --disk-folder, or plan without --disk"
        )


@final
class VirtualDiskCopies(CopyEngine):
    """What `DiskCopies` does, as a tape shows it. A storage is there when the last of its pieces is; pieces are written while others still leave the card."""

    def __init__(self, slab: DiskSlab, link: Link) -> None:
        self._link = link
        self._whole = slab.host_part.bytes
        self._disk = torch.cuda.Stream()

    def begin(self, source: Any, target: Any, *, to_host: bool, held: tuple[Any, ...] = ()) -> Ticket:
        """As in `DiskCopies`."""
        # Only now: a user's process has no tape.
        from tightfit.capture.observe import disk_traffic

        there = target if to_host else source
        if not isinstance(there, DiskPlace):
            return self._link.begin(source, target, to_host=to_host, held=held)
        self._disk.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._disk):
            disk_traffic.move(CopyDirection.TO_DISK if to_host else CopyDirection.FROM_DISK, len(there))
        tensor = source if to_host else target
        for piece in tensor.split(len(self._whole)):
            buffer = self._whole[: len(piece)]
            ticket = self._link.begin(*((piece, buffer) if to_host else (buffer, piece)), to_host=to_host)
            self._disk.wait_event(ticket.done)
        return Ticket(
            is_to_card=not to_host,
            done=self._disk.record_event(),
            stream=torch.cuda.current_stream(),
            held=(tensor, there, *held),
            is_in_order=False,
        )

    def move_at_host(self, direction: CopyDirection, num_bytes: int) -> None:
        """Reads to memory of the host, or writes from there, and waits."""
        # Only now: a user's process has no tape.
        from tightfit.capture.observe import disk_traffic

        self._disk.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._disk):
            disk_traffic.move(direction, num_bytes)
        self._disk.record_event().synchronize()

    def wait(self, ticket: Ticket) -> None:
        """As in `DiskCopies`: the host waits."""
        if ticket.is_in_order:
            self._link.wait(ticket)
            return
        ticket.done.synchronize()
        torch.cuda.current_stream().wait_event(ticket.done)

    def finish(self, ticket: Ticket) -> None:
        """As in `CopyEngine`."""
        if ticket.is_in_order:
            self._link.finish(ticket)
        else:
            self.wait(ticket)

    def is_of_present_stream(self, ticket: Ticket) -> bool:
        """As in `CopyEngine`."""
        return bool(torch.cuda.current_stream() == ticket.stream)
