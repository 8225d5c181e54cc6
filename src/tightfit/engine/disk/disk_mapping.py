"""Memory of a private mapping of one of our files: a page is the file's until somebody writes to it, and the process's own from then on."""

import mmap
from typing import TYPE_CHECKING

import torch

from tightfit.engine.disk.disk_places import OnDisk
from tightfit.engine.disk.disk_sizes import in_pages

if TYPE_CHECKING:
    from tightfit.capture.observe.disk_traffic import VirtualFile
    from tightfit.engine.disk.disk_file import DiskFile


class DiskMapping:
    """All of `file` as it is now; `is_virtual` on the virtual GPU, where nobody writes to it."""

    def __init__(self, file: "DiskFile | VirtualFile", *, is_virtual: bool) -> None:
        self._is_virtual = is_virtual
        self._addresses = file.mapped()
        with torch.inference_mode(False):
            self._whole = torch.frombuffer(self._addresses, dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self._whole)

    def memory_of(self, place: OnDisk) -> torch.Tensor:
        """What is there, uint8, of shape (num_bytes,)."""
        with torch.inference_mode(False):
            memory = self._whole[place.begin : place.begin + place.num_bytes]
            # In a storage of its own: whoever saves a weight (`torch.save`), or asks which of them share memory (safetensors), is not told of the file. A tape
            # knows what is on disk by the storage of all of it.
            return memory if self._is_virtual or not len(memory) else torch.from_numpy(memory.numpy())

    def keep_out_of_forks(self) -> None:
        """A fork does not have this memory."""
        if not self._is_virtual:
            self._addresses.madvise(mmap.MADV_DONTFORK)

    def has(self, place: OnDisk, memory: torch.Tensor) -> bool:
        """Whether `memory`, which was that of this place, still is: a program may have it moved to memory that processes share (`share_memory_`)."""
        return memory.data_ptr() == self._whole.data_ptr() + place.begin

    def forget_written(self, place: OnDisk) -> None:
        """Gives the memory of pages back that were written to: they are the file's again, which is to have the same bytes."""
        if not self._is_virtual:
            self._addresses.madvise(mmap.MADV_DONTNEED, place.begin, in_pages(place.num_bytes))
