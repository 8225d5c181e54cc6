"""One weight that is at the host, and on the card only while it is used.

The parameter is the same object all the time; what changes is its `data`: on the card, or the bytes at the host themselves. So whoever reads a weight that
is away reads its values, and whoever writes to it writes them: an average of the weights, a state dict, a pickle, a copy of the model. They are shown as
a tensor of the card (`engine.zero_copy`); where that is not possible, as for mapped files, a computation that mixes it with tensors there ends in torch's
error about devices. To empty the storage instead, as FSDP does, was tried: accesses to
an empty storage end the process, are pickled as nothing, or read what lies there (docs/log.md).
"""

import enum
from typing import TYPE_CHECKING

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tightfit.capture.processes.process_role import is_simulated
from tightfit.engine.copy_engines import CopyEngine
from tightfit.engine.host_slab import Part
from tightfit.engine.weights.weights_in_files import PartOfFile
from tightfit.engine.zero_copy import seen_from
from tightfit.torch_hooks.manifest import STORAGE_USES

if TYPE_CHECKING:
    from tightfit.engine.copy_engines import Ticket
    from tightfit.engine.weights.streamed_gradient import StreamedGradient


class Residence(enum.Enum):
    """Where the data of a weight is. `COMING`: at the host, and a copy to the card is under way."""

    HOST = enum.auto()
    COMING = enum.auto()
    CARD = enum.auto()


class StreamedWeight:
    """A parameter with `part`, host memory for the bytes of its storage, which `leave` takes it to, or a part of a file that has them already.

    It is on `device`, the card, or was never moved there.
    """

    def __init__(self, parameter: torch.Tensor, part: Part | PartOfFile, device: torch.device) -> None:
        self.parameter = parameter
        self.part = part
        self.residence = Residence.CARD
        self.num_bytes = parameter.untyped_storage().nbytes()
        self._device = device
        self._dtype, self._shape, self._stride = parameter.dtype, parameter.shape, parameter.stride()
        self._offset = parameter.storage_offset()
        with torch.inference_mode(False), torch.no_grad():
            self.bytes_at_host = part.with_storage() if isinstance(part, Part) else part.bytes
            # Of a storage of its own, whose memory the program may exchange (`share_memory_`).
            self._at_host = self._of(seen_from(device, self.bytes_at_host))
            # What copies to the card read.
            self._source = self.bytes_at_host if isinstance(part, Part) else part.source
            num_elements = self.num_bytes // parameter.element_size()
            self._on_card: torch.Tensor | None = parameter.data.as_strided((num_elements,), (1,), 0).view(torch.uint8)
        self._uses_of_ours = self._uses_at_host()
        # Writes are counted by the parameter's versions, which other data may have others of.
        self._num_writes, self._base = 0, parameter._version
        # Nothing is at the host yet, but what is in a file.
        self._writes_there = 0 if isinstance(part, PartOfFile) else -1
        self._ticket: Ticket | None = None
        self._fetched: Ticket | None = None
        # Memory on the card that it has left, with how often it had been written to: what the program has of it (a view) is of that memory.
        self._left: list[tuple[StorageWeakRef, int]] = []
        self.gradient: StreamedGradient | None = None
        """Of a weight that is trained."""

    @property
    def key(self) -> int:
        """The address of its storage on the card, by which tensors that are saved of it are known."""
        return self.on_card.untyped_storage()._cdata

    @property
    def on_card(self) -> torch.Tensor:
        """Its bytes on the card, uint8, of shape (num_bytes,); it has to be there."""
        assert self._on_card is not None
        return self._on_card

    @property
    def num_writes(self) -> int:
        """How often it was written to, as far as versions say."""
        return self._num_writes + self.parameter._version - self._base

    @property
    def was_written(self) -> bool:
        """Whether it was written to since its bytes on the card and at the host were equal."""
        return self.num_writes != self._writes_there

    def is_ours(self) -> bool:
        """Whether its data is what was put there, and not what the program has set since (another dtype, another device)."""
        # All weights at the host lie in one storage: another one's data is told from its own by the place alone.
        expected = self._of(self.on_card) if self.residence is Residence.CARD else self._at_host
        return _place(self.parameter) == _place(expected)

    def fetch(self, copies: CopyEngine) -> None:
        """Begins to bring it to the card."""
        # In an evaluation in inference mode too: what comes there may be needed for a backward pass later.
        with torch.inference_mode(False):
            self._on_card = torch.empty(self.num_bytes, dtype=torch.uint8, device=self._device)
        self._copy_to_card(copies)
        self.residence = Residence.COMING

    def arrive(self, copies: CopyEngine) -> None:
        """Has it on the card, for what is computed from now on."""
        self._wait(copies)
        if self.was_written:
            # At the host, while it was copied.
            self._copy_to_card(copies)
            self._wait(copies)
        with torch.inference_mode(False), torch.no_grad():
            self._set_data(self._of(self.on_card))
        self.residence = Residence.CARD

    def leave(self, copies: CopyEngine) -> bool:
        """Gives its memory on the card back; whether it had to be copied to the host before, because it was written to."""
        was_written = self.was_written
        if was_written:
            copies.wait(copies.begin(self.on_card, self.bytes_at_host, to_host=True, held=(self.part,)))
        # From now on the program may write to the bytes at the host, at once: what was copied from there has to be on the card.
        if self._fetched is not None:
            copies.finish(self._fetched)
            self._fetched = None
        left = StorageWeakRef(self.on_card.untyped_storage())
        self._set_data(self._at_host)
        self._on_card, self.residence = None, Residence.HOST
        # A file that the program has mapped is the memory at the host, which the weight was in at first.
        if not left.expired() and left.cdata != StorageWeakRef(self._at_host.untyped_storage()).cdata:
            self._left.append((left, self.num_writes))
        return was_written

    def has_view(self, *, of_other_values: bool) -> bool:
        """Whether the program holds something that lies in memory on the card which the weight has left: any, or only such as has missed a write."""
        if self._left:
            self._left = [(left, num_writes) for left, num_writes in self._left if not left.expired()]
        return any(not of_other_values or num_writes != self.num_writes for _, num_writes in self._left)

    def twin(self) -> torch.Tensor | None:
        """The weight's bytes at the host as a tensor there, where the parameter itself shows them as one of the card."""
        shown, own = self._at_host.untyped_storage(), self.bytes_at_host.untyped_storage()
        if self.residence is Residence.CARD or shown._cdata == own._cdata:
            return None
        return self._of(self.bytes_at_host)

    def has_view_at_host(self) -> bool:
        """Whether the program holds something that lies in its memory at the host, which it has left."""
        if is_simulated() or self.residence is not Residence.CARD or not isinstance(self.part, Part):
            return False
        return self._uses_at_host() > self._uses_of_ours

    def _uses_at_host(self) -> int:
        return int(STORAGE_USES.call(self._at_host.untyped_storage()._cdata))

    def return_to_host(self, copies: CopyEngine) -> None:
        """Stays in its memory at the host for good, where that is as good as the card's: what the program has of it lies there."""
        self.leave(copies)
        self._on_card, self.residence = self.bytes_at_host, Residence.CARD

    def copied(self, copies: CopyEngine) -> torch.Tensor:
        """A copy on the card of its bytes at the host, as `on_card`, for whoever needs those that the program has replaced."""
        if self._on_card is not None:
            return self._on_card
        whole = torch.empty(self.num_bytes, dtype=torch.uint8, device=self._device)
        copies.wait(copies.begin(self._source, whole, to_host=False, held=(self.part,)))
        return whole

    def bring_alone(self) -> None:
        """Has it on the card for good, with a copy of torch's own: the engine's have failed."""
        with torch.inference_mode(False), torch.no_grad():
            self._on_card = self.bytes_at_host.to(self._device, copy=True)
            self._set_data(self._of(self._on_card))
        self.residence = Residence.CARD

    def forget_copy(self, copies: CopyEngine) -> None:
        """What is on its way is not needed."""
        self._wait(copies)
        assert self._fetched is not None
        copies.finish(self._fetched)
        self._fetched = None
        self._on_card, self.residence = None, Residence.HOST

    def _copy_to_card(self, copies: CopyEngine) -> None:
        self._writes_there = self.num_writes
        self._ticket = copies.begin(self._source, self.on_card, to_host=False, held=(self.part,))

    def _wait(self, copies: CopyEngine) -> None:
        assert self._ticket is not None
        copies.wait(self._ticket)
        self._ticket, self._fetched = None, self._ticket

    def _set_data(self, data: torch.Tensor) -> None:
        self._num_writes = self.num_writes
        self.parameter.data = data
        self._base = self.parameter._version

    def _of(self, whole: torch.Tensor) -> torch.Tensor:
        """The weight as a view of its bytes."""
        elements = whole.view(self._dtype)
        # Offsets are those in the storage, and a part of the slab has one of its own.
        return elements.as_strided(self._shape, self._stride, elements.storage_offset() + self._offset)


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    """Which bytes a tensor is, and as what."""
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
