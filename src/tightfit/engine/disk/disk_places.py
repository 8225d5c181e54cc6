"""Where a storage is on disk, and how a piece of it is read back: a place in a file of ours, or weights that lie in a mapped file.

Mapped weights are memory of the program, which may write to them: a page that it has written to is its own from then on, and the file has the bytes of before.
So a piece comes from the file, past the page cache where it is ours, while none of its pages was written to, and from memory otherwise.
"""

import abc
import dataclasses
import zlib
from typing import TYPE_CHECKING, final

import torch

from tightfit.engine.disk.disk_file import DiskFile
from tightfit.engine.disk.disk_sizes import in_pages
from tightfit.engine.disk.file_mappings import MappedFile, was_written

if TYPE_CHECKING:
    from tightfit.capture.observe.disk_traffic import VirtualFile
    from tightfit.engine.disk.disk_copies import Moving


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostBuffer:
    """A piece of host memory that begins at a page: as a tensor, uint8, and as memory that the system reads and writes."""

    bytes: torch.Tensor
    memory: memoryview


class DiskPlace(abc.ABC):
    """Some bytes that can be read in pieces."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """How many."""

    @abc.abstractmethod
    def read(self, buffer: HostBuffer, at: int, num_bytes: int, number: int) -> None:
        """Fills `buffer` with the `num_bytes` at `at`, which are the piece of this `number`.

        Raises:
            OSError: they cannot be read, or are not what was written.
        """


@final
@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class OnDisk(DiskPlace):
    """`num_bytes` from `begin` on in `file`.

    `checksums` has one for each piece that was written, `writing` is what is under way to it. `rescued` has the bytes in host memory, uint8, of shape
    (num_bytes,), where they could not be written, or are not to be, for the reason `why_at_host`.
    """

    file: "DiskFile | VirtualFile"
    begin: int
    num_bytes: int
    checksums: list[int] = dataclasses.field(default_factory=list)
    writing: "Moving | None" = None
    rescued: torch.Tensor | None = None
    why_at_host: str = ""

    def __len__(self) -> int:
        return self.num_bytes

    def read(self, buffer: HostBuffer, at: int, num_bytes: int, number: int) -> None:
        content = buffer.memory[: in_pages(num_bytes)]
        assert isinstance(self.file, DiskFile)
        self.file.read(content, self.begin + at)
        if checksum(content) != self.checksums[number]:
            raise OSError("the checksum does not match")


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InMemoryOfFile(DiskPlace):
    """A weight that lies in a private mapping of a file: `memory`, uint8, of shape (num_bytes,). It is `written` there in a file of ours, or at `offset` of
    one that is `opened`; with neither it is read from memory alone."""

    memory: torch.Tensor
    written: OnDisk | None = None
    opened: MappedFile | None = None
    offset: int = 0
    address: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "address", self.memory.data_ptr())

    def __len__(self) -> int:
        return len(self.memory)

    def read(self, buffer: HostBuffer, at: int, num_bytes: int, number: int) -> None:
        piece = self.memory[at : at + num_bytes]
        # A program may have moved what lies in its storage, to memory that processes share (`share_memory_`).
        is_mapped = self.memory.data_ptr() == self.address and (self.written is not None or self.opened is not None)
        if not is_mapped or was_written(piece.data_ptr(), num_bytes):
            buffer.bytes[:num_bytes].copy_(piece)
            if self.opened is not None:
                # Pages beside those that were written are the file's.
                self.opened.check()
        elif self.written is not None:
            self.written.read(buffer, at, num_bytes, number)
        elif self.opened is not None:
            self.opened.read(buffer.memory[:num_bytes], self.offset + at)


def checksum(content: memoryview) -> int:
    """A checksum of whole pages."""
    return zlib.crc32(content)
