"""Threads that move the pieces of a storage between the card and its place on disk, through buffers of host memory, with a checksum of each piece.

A fork has no threads but the one that forked: they begin anew there, and what was under way is read again; what was to be written is not.
"""

import dataclasses
import os
from collections.abc import Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import torch

from tightfit.engine.copy_engines import Link, submitted
from tightfit.engine.disk.disk_file import DiskFile
from tightfit.engine.disk.disk_places import DiskPlace, HostBuffer, OnDisk, checksum
from tightfit.engine.disk.disk_sizes import in_pages

_MOST_THREADS = 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Moving:
    """What is under way between `tensor`, on the card, and `there`; `process` is the one whose threads do it."""

    there: DiskPlace
    tensor: torch.Tensor
    to_disk: bool
    pieces: tuple[Future[None], ...]
    process: int


class DiskThreads:
    """A thread for each of `buffers`, up to `_MOST_THREADS`."""

    def __init__(self, buffers: Sequence[HostBuffer], link: Link) -> None:
        self._link = link
        self._all_buffers = buffers
        self._begin_threads()

    def _begin_threads(self) -> None:
        self._process = os.getpid()
        self._buffers: SimpleQueue[HostBuffer] = SimpleQueue()
        for buffer in self._all_buffers:
            self._buffers.put(buffer)
        num_threads = min(len(self._all_buffers), _MOST_THREADS)
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="tightfit-disk")

    def move(self, tensor: torch.Tensor, there: DiskPlace, *, to_disk: bool, held: tuple[Any, ...] = ()) -> Moving:
        """Begins to move `tensor` to `there`, or back; `held` is kept until then."""
        if self._process != os.getpid():
            self._begin_threads()
        pieces = self._pieces(tensor, there, to_disk, held)
        return Moving(there=there, tensor=tensor, to_disk=to_disk, pieces=pieces, process=self._process)

    def error_of(self, moving: Moving) -> BaseException | None:
        """Waits for what is under way; the first error of a thread."""
        if moving.process != os.getpid():
            # The threads that were to do it are in the other process.
            if moving.to_disk:
                return OSError("the process was forked meanwhile")
            moving = self.move(moving.tensor, moving.there, to_disk=False)
        futures.wait(moving.pieces)
        return next((error for piece in moving.pieces if (error := piece.exception()) is not None), None)

    def _pieces(
        self, tensor: torch.Tensor, there: DiskPlace, to_disk: bool, held: tuple[Any, ...] = ()
    ) -> tuple[Future[None], ...]:
        parts = tensor.split(self._piece_bytes)
        if isinstance(there, OnDisk) and to_disk:
            there.checksums = [0] * len(parts)
        move = self._write if to_disk else self._read
        after = self._link.mark()
        return tuple(
            submitted(self._pool, move, [part, held], there, number, after) for number, part in enumerate(parts)
        )

    @property
    def _piece_bytes(self) -> int:
        return len(self._all_buffers[0].bytes)

    # A thread has given up what it moves before anybody hears that it is done: whether a tensor is referred to by others is asked then.
    def _write(self, given: list[Any], there: OnDisk, number: int, after: Any) -> None:
        (part, _held), given[:] = given, []
        buffer = self._buffers.get()
        try:
            self._link.move(part, buffer.bytes[: len(part)], to_host=True, after=after)
            content = buffer.memory[: in_pages(len(part))]
            there.checksums[number] = checksum(content)
            assert isinstance(there.file, DiskFile)
            there.file.write(content, there.begin + number * self._piece_bytes)
        finally:
            self._buffers.put(buffer)

    def _read(self, given: list[Any], there: DiskPlace, number: int, after: Any) -> None:
        (part, _held), given[:] = given, []
        buffer = self._buffers.get()
        try:
            there.read(buffer, number * self._piece_bytes, len(part), number)
            self._link.move(buffer.bytes[: len(part)], part, to_host=False, after=after)
        finally:
            self._buffers.put(buffer)

    def read_here(self, moving: Moving) -> BaseException | None:
        """Reads again without threads, which may be what has failed; the error, if it is none of theirs."""
        after = self._link.mark()
        try:
            for number, part in enumerate(moving.tensor.split(self._piece_bytes)):
                self._read([part, None], moving.there, number, after)
        except Exception as error:  # noqa: BLE001 - whatever it is, the bytes cannot be had
            # Its frames would keep what the caller waits for.
            return error.with_traceback(None)
        return None
