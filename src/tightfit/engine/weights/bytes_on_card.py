"""The bytes of a weight on the card, the copies that bring them there, and what the program still has of those that it has left."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tightfit.engine.copy_engines import CopyEngine, Ticket
from tightfit.engine.disk.disk_places import InMemoryOfFile
from tightfit.engine.host_slab import Part
from tightfit.engine.weights.weights_in_files import PartOfFile


class BytesOnCard:
    """The bytes of a weight on `device`. `source` has them at the host, in memory or a file of `part`."""

    def __init__(
        self,
        parameter: torch.Tensor,
        source: torch.Tensor | InMemoryOfFile,
        part: Part | PartOfFile,
        device: torch.device,
    ) -> None:
        self._device = device
        self._source = source
        self._part = part
        self._num_bytes = parameter.untyped_storage().nbytes()
        num_elements = self._num_bytes // parameter.element_size()
        with torch.inference_mode(False), torch.no_grad():
            self._whole: torch.Tensor | None = parameter.data.as_strided((num_elements,), (1,), 0).view(torch.uint8)
        self._coming: Ticket | None = None
        self._fetched: Ticket | None = None

    @property
    def whole(self) -> torch.Tensor:
        """The bytes, uint8, of shape (num_bytes,); they have to be there."""
        assert self._whole is not None
        return self._whole

    @whole.setter
    def whole(self, whole: torch.Tensor) -> None:
        self._whole = whole

    def take(self) -> None:
        """Takes memory for them."""
        # In an evaluation in inference mode too: what comes there may be needed for a backward pass later.
        with torch.inference_mode(False):
            self._whole = torch.empty(self._num_bytes, dtype=torch.uint8, device=self._device)

    def begin_to_come(self, copies: CopyEngine) -> None:
        """Begins the copy."""
        self._coming = copies.begin(self._source, self.whole, to_host=False, held=(self._part,))

    def wait(self, copies: CopyEngine) -> None:
        """Waits for the copy, for what is computed from now on."""
        assert self._coming is not None
        copies.wait(self._coming)
        self._coming, self._fetched = None, self._coming

    def finish(self, copies: CopyEngine) -> None:
        """Returns once what was copied is there: from now on the program may write to the bytes at the host."""
        if self._fetched is not None:
            copies.finish(self._fetched)
            self._fetched = None

    def give_back(self) -> None:
        """Gives the memory back."""
        self._whole = None

    def copied(self, copies: CopyEngine) -> torch.Tensor:
        """The bytes, or a copy of them where they are not there, for whoever needs those that the program has replaced."""
        if self._whole is not None:
            return self._whole
        whole = torch.empty(self._num_bytes, dtype=torch.uint8, device=self._device)
        copies.wait(copies.begin(self._source, whole, to_host=False, held=(self._part,)))
        return whole


class LeftMemory:
    """Memory on the card that a weight has left, with how often that had been written to: what the program has of it (a view) is of that memory."""

    def __init__(self) -> None:
        self._left: list[tuple[StorageWeakRef, int]] = []

    def note(self, left: StorageWeakRef, num_writes: int) -> None:
        """The weight has left this storage."""
        self._left.append((left, num_writes))

    def is_held(self, *, unless_written: int | None = None) -> bool:
        """Whether the program holds something that lies in such memory: any, or only such as was written to another number of times."""
        if self._left:
            self._left = [(left, num_writes) for left, num_writes in self._left if not left.expired()]
        return any(num_writes != unless_written for _, num_writes in self._left)
