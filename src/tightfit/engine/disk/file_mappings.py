"""Which memory of this process is a private mapping of a file, as loaders of weights leave it, and which of its pages have been written to since.

A page of such a mapping is the file's until somebody writes to it, and a page of the process's own from then on (mmap(2), MAP_PRIVATE). The system says
which it is in /proc/self/pagemap, bits 61 to 63 (Documentation/admin-guide/mm/pagemap.rst of Linux): written pages are there or swapped out, and not of a file.
"""

import dataclasses
import errno
import mmap
import os
from typing import final

import numpy as np

from tightfit.engine.descriptors import Descriptor

_MAPS, _PAGES = "/proc/self/maps", "/proc/self/pagemap"
_OF_FILE, _SWAPPED, _PRESENT = (np.uint64(1 << bit) for bit in (61, 62, 63))


@final
class MappedFile:
    """A mapped file that is open to be read from. Its pages are those that were mapped only as long as nobody writes to the file."""

    def __init__(self, path: str, descriptor: Descriptor) -> None:
        self._path = path
        self._descriptor = descriptor
        self._written = self._last_write()

    def read(self, into: memoryview, at: int) -> None:
        """Fills `into` with the bytes from `at` on.

        Raises:
            OSError: they cannot be read, or the file was written to since it was opened.
        """
        done = 0
        while done < len(into):
            num_bytes = os.preadv(self._descriptor.number, [into[done:]], at + done)
            if not num_bytes:
                raise OSError(errno.EIO, "the file is shorter than it was")
            done += num_bytes
        self.check()

    def check(self) -> None:
        """To be called when something was read, from the file or from its mapping.

        Raises:
            OSError: the file was written to since it was opened.
        """
        if self._last_write() != self._written:
            raise OSError(f"{self._path} was written to while its weights are in use")

    def _last_write(self) -> tuple[int, int]:
        found = os.fstat(self._descriptor.number)
        return found.st_mtime_ns, found.st_size


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FileRange:
    """The bytes from `offset` on of the file at `path`, which has this `device` and `inode` while it is the one that is mapped."""

    path: str
    offset: int
    device: int
    inode: int

    def opened(self) -> MappedFile:
        """The file, to read from.

        Raises:
            OSError: it is not there any more, or is another one.
        """
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        found = os.fstat(descriptor)
        if (found.st_dev, found.st_ino) != (self.device, self.inode):
            os.close(descriptor)
            raise OSError(f"{self.path} is not the file that is mapped any more")
        return MappedFile(self.path, Descriptor(descriptor))


@final
class FileMappings:
    """The private mappings of files that there are now."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int, FileRange]] = []
        try:
            with open(_MAPS, encoding="utf-8", errors="surrogateescape") as maps:
                lines = maps.read().splitlines()
        except OSError:
            # Another system than Linux.
            return
        for line in lines:
            # proc(5): address range, permissions, offset, device, inode, path.
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[1].endswith("p") and fields[4] != "0" and fields[5].startswith("/"):
                begin, end = (int(number, 16) for number in fields[0].split("-"))
                major, minor = (int(number, 16) for number in fields[3].split(":"))
                there = FileRange(
                    path=fields[5], offset=int(fields[2], 16), device=os.makedev(major, minor), inode=int(fields[4])
                )
                self._ranges.append((begin, end, there))

    def range_of(self, address: int, num_bytes: int) -> FileRange | None:
        """What the `num_bytes` at `address` are mapped from; None where they are not all of one file."""
        for begin, end, there in self._ranges:
            if begin <= address and address + num_bytes <= end:
                return dataclasses.replace(there, offset=there.offset + address - begin)
        return None


def was_written(address: int, num_bytes: int) -> bool:
    """Whether a page of this range of a private mapping was written to; True where the system does not tell."""
    if not num_bytes:
        return False
    first, last = address // mmap.PAGESIZE, (address + num_bytes - 1) // mmap.PAGESIZE
    wanted = 8 * (last - first + 1)
    try:
        descriptor = os.open(_PAGES, os.O_RDONLY | os.O_CLOEXEC)
        try:
            entries = os.pread(descriptor, wanted, 8 * first)
        finally:
            os.close(descriptor)
    except OSError:
        return True
    if len(entries) < wanted:
        return True
    pages = np.frombuffer(entries, dtype=np.uint64)
    return bool(((pages & (_PRESENT | _SWAPPED) != 0) & (pages & _OF_FILE == 0)).any())
