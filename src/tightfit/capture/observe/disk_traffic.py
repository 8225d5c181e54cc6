"""The disk as a traced program sees it: a file takes no space here, and what is moved goes to the tape, where it takes its time on the disk."""

import mmap

import torch

from tightfit.capture.observe.reserved_memory import reserved
from tightfit.capture.observe.streams import VirtualStream
from tightfit.tape import CopyDirection

_NAMES = {CopyDirection.TO_DISK: "tightfit.write_to_disk", CopyDirection.FROM_DISK: "tightfit.read_from_disk"}


class VirtualFile:
    """Space on the disk, held until this object is gone."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._mapped: set[int] = set()

    def extend(self, num_bytes: int) -> None:
        """The file grows by `num_bytes`."""
        VirtualStream.recorder.disk.hold(num_bytes)
        self.num_bytes += num_bytes

    def mapped(self) -> mmap.mmap:
        """Addresses for all of it, none of which is ever written to; a tensor there is on the disk, and does not count as memory of the host."""
        mapping = reserved(self.num_bytes)
        self._mapped.add(torch.frombuffer(mapping, dtype=torch.uint8).data_ptr())
        VirtualStream.recorder.host.on_disk |= self._mapped
        return mapping

    def __del__(self) -> None:
        VirtualStream.recorder.host.on_disk -= self._mapped
        VirtualStream.recorder.disk.hold(-self.num_bytes)


def move(direction: CopyDirection, num_bytes: int) -> None:
    """`num_bytes` are written or read, on the current stream: a thread beside the program's does it, and no kernel is launched."""
    recorder = VirtualStream.recorder
    recorder.operator(recorder.strings.intern(_NAMES[direction]), 0, 0, 0, 0.0, 0, 0)
    recorder.copy(direction, num_bytes, is_pinned=True, is_blocking=False)
