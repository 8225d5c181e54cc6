"""Weights that are on disk between their uses: in the file that the program has mapped them from, or else in one of ours, to which they are written once.

Either way the parameter's data is memory of a private mapping, so the program reads and writes the weight as if it were at the host. Nothing is written to a
file afterwards: what the program writes, in this process or in a fork, takes memory, and only there. What a card needs is read from the file itself.
"""

import dataclasses
from collections.abc import Iterable

import torch

from tightfit.capture.processes.process_role import is_simulated
from tightfit.engine.copy_engines import CopyEngine
from tightfit.engine.disk.disk_file import DiskFile
from tightfit.engine.disk.disk_places import InMemoryOfFile
from tightfit.engine.disk.disk_sizes import in_pages
from tightfit.engine.disk.disk_slab import DiskPart, DiskSlab
from tightfit.engine.disk.error_text import error_text
from tightfit.engine.disk.file_mappings import FileMappings, FileRange, MappedFile
from tightfit.errors import ApplyError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartOfFile:
    """The `bytes` of a weight, uint8, of shape (num_bytes,), in memory that is mapped from a file, and the `source` that copies read; `held` lives as long."""

    bytes: torch.Tensor
    source: InMemoryOfFile
    held: DiskPart | None = None

    @property
    def is_ours(self) -> bool:
        """Whether the file is one of ours."""
        return self.held is not None


class WeightFiles:
    """Parts for weights: of `slab`, written by `copies`, or where the weights lie already."""

    def __init__(self, slab: DiskSlab, copies: CopyEngine) -> None:
        self.slab = slab
        self._copies = copies
        self._opened: dict[tuple[str, int, int], MappedFile] = {}

    def part_of(self, parameter: torch.Tensor) -> PartOfFile:
        """The bytes of its storage, on disk.

        Raises:
            ApplyError: the disk fails.
        """
        there = file_range_of(parameter)
        if there is not None:
            return self._mapped_by_the_program(parameter, there)
        return self.written(parameter)

    def written(self, parameter: torch.Tensor) -> PartOfFile:
        """The bytes of its storage, in our file.

        Raises:
            ApplyError: the disk fails.
        """
        whole = _whole_storage(parameter)
        part = self.slab.take(len(whole))
        self._copies.wait(self._copies.begin(whole, part.bytes, to_host=True, held=(part,)))
        try:
            if part.bytes.rescued is not None:
                raise OSError("a write has failed")
            if isinstance(self.slab.file, DiskFile):
                self.slab.file.flush()
        except OSError as error:
            raise ApplyError(
                f"weights could not be written to the disk of {self.folder} ({error_text(error)}); choose another folder with --disk-folder, or plan without --disk"
            ) from error
        memory = self.slab.mapped(part)
        return PartOfFile(bytes=memory, source=InMemoryOfFile(memory=memory, written=part.bytes), held=part)

    @property
    def folder(self) -> str:
        """Where our file is."""
        return self.slab.file.folder if isinstance(self.slab.file, DiskFile) else ""

    def _mapped_by_the_program(self, parameter: torch.Tensor, there: FileRange) -> PartOfFile:
        memory = _whole_storage(parameter)
        key = there.path, there.device, there.inode
        try:
            if key not in self._opened:
                self._opened[key] = there.opened()
        except OSError:
            # Its memory is there all the same.
            return PartOfFile(bytes=memory, source=InMemoryOfFile(memory=memory))
        return PartOfFile(
            bytes=memory, source=InMemoryOfFile(memory=memory, opened=self._opened[key], offset=there.offset)
        )


def bytes_on_disk(parameters: Iterable[torch.Tensor]) -> int:
    """What a file of ours takes for those of these parameters that lie in no other."""
    return sum(in_pages(p.untyped_storage().nbytes()) for p in parameters if file_range_of(p) is None)


def file_range_of(parameter: torch.Tensor) -> FileRange | None:
    """Where the storage of a parameter is mapped from, if the program has it from a file."""
    storage = parameter.untyped_storage()
    # What can be made larger is memory of torch's own.
    if parameter.device.type != "cpu" or storage.resizable() or is_simulated():
        return None
    return FileMappings().range_of(storage.data_ptr(), storage.nbytes())


def _whole_storage(parameter: torch.Tensor) -> torch.Tensor:
    """All bytes of its storage, uint8, of shape (num_bytes,)."""
    num_elements = parameter.untyped_storage().nbytes() // parameter.element_size()
    with torch.inference_mode(False), torch.no_grad():
        return parameter.data.as_strided((num_elements,), (1,), 0).view(torch.uint8)
