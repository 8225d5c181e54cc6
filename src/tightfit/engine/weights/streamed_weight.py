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
from tightfit.engine.weights.bytes_on_card import BytesOnCard, LeftMemory
from tightfit.engine.weights.parameter_data import ParameterData
from tightfit.engine.weights.weights_in_files import PartOfFile
from tightfit.engine.zero_copy import seen_from
from tightfit.torch_hooks.manifest import STORAGE_USES

if TYPE_CHECKING:
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
        self.block = 0
        """The number of the block that it is of."""
        self.residence = Residence.CARD
        self.num_bytes = parameter.untyped_storage().nbytes()
        # Nothing is at the host yet, but what is in a file.
        self.data = ParameterData(parameter, is_at_host=isinstance(part, PartOfFile))
        self._device = device
        with torch.inference_mode(False), torch.no_grad():
            self.bytes_at_host = part.with_storage() if isinstance(part, Part) else part.bytes
            # Of a storage of its own, whose memory the program may exchange (`share_memory_`).
            self._at_host = self.data.of(seen_from(device, self.bytes_at_host))
        # What copies to the card read.
        source = self.bytes_at_host if isinstance(part, Part) else part.source
        self.on_card = BytesOnCard(parameter, source, part, device)
        self.left = LeftMemory()
        self._uses_of_ours = _num_uses(self._at_host)
        self.is_streamed = True
        """Whether it will leave the card again."""
        self.gradient: StreamedGradient | None = None
        """Of a weight that is trained."""

    def is_ours(self) -> bool:
        """Whether its data is what was put there, and not what the program has set since."""
        # All weights at the host lie in one storage: another one's data is told from its own by the place alone.
        is_there = self.residence is Residence.CARD
        return self.data.are(self.data.of(self.on_card.whole) if is_there else self._at_host)

    def fetch(self, copies: CopyEngine) -> None:
        """Begins to bring it to the card."""
        self.on_card.take()
        self.data.are_copied()
        self.on_card.begin_to_come(copies)
        self.residence = Residence.COMING

    def arrive(self, copies: CopyEngine) -> None:
        """Has it on the card, for what is computed from now on."""
        self.on_card.wait(copies)
        if self.data.was_written:
            # At the host, while it was copied.
            self.data.are_copied()
            self.on_card.begin_to_come(copies)
            self.on_card.wait(copies)
        with torch.inference_mode(False), torch.no_grad():
            self.data.exchange(self.data.of(self.on_card.whole))
        self.residence = Residence.CARD

    def leave(self, copies: CopyEngine) -> bool:
        """Gives its memory on the card back; whether it had to be copied to the host before, because it was written to."""
        was_written = self.data.was_written
        if was_written:
            copies.wait(copies.begin(self.on_card.whole, self.bytes_at_host, to_host=True, held=(self.part,)))
        # From now on the program may write to the bytes at the host, at once: what was copied from there has to be on the card.
        self.on_card.finish(copies)
        left = StorageWeakRef(self.on_card.whole.untyped_storage())
        self.data.exchange(self._at_host)
        self.on_card.give_back()
        self.residence = Residence.HOST
        # A file that the program has mapped is the memory at the host, which the weight was in at first.
        if not left.expired() and left.cdata != StorageWeakRef(self._at_host.untyped_storage()).cdata:
            self.left.note(left, self.data.num_writes)
        return was_written

    def twin(self) -> torch.Tensor | None:
        """The weight's bytes at the host as a tensor there, where the parameter itself shows them as one of the card."""
        shown, own = self._at_host.untyped_storage(), self.bytes_at_host.untyped_storage()
        if self.residence is Residence.CARD or shown._cdata == own._cdata:
            return None
        return self.data.of(self.bytes_at_host)

    def has_view_at_host(self) -> bool:
        """Whether the program holds something that lies in its memory at the host, which it has left."""
        # A file that the program has mapped is its own memory.
        is_ours = isinstance(self.part, Part) or self.part.is_ours
        if is_simulated() or self.residence is not Residence.CARD or not is_ours:
            return False
        return _num_uses(self._at_host) > self._uses_of_ours

    def return_to_host(self, copies: CopyEngine) -> None:
        """Stays in its memory at the host for good, where that is as good as the card's: what the program has of it lies there."""
        self.leave(copies)
        self.on_card.whole, self.residence = self.bytes_at_host, Residence.CARD

    def bring_alone(self) -> None:
        """Has it on the card for good, with a copy of torch's own: the engine's have failed."""
        with torch.inference_mode(False), torch.no_grad():
            self.on_card.whole = self.bytes_at_host.to(self._device, copy=True)
            self.data.exchange(self.data.of(self.on_card.whole))
        self.residence = Residence.CARD

    def forget_copy(self, copies: CopyEngine) -> None:
        """What is on its way is not needed."""
        self.on_card.wait(copies)
        self.on_card.finish(copies)
        self.on_card.give_back()
        self.residence = Residence.HOST


def _num_uses(tensor: torch.Tensor) -> int:
    return int(STORAGE_USES.call(tensor.untyped_storage()._cdata))
