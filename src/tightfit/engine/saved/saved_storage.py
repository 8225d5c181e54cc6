"""One storage that is saved for backward: on the card, on its way to the host, there, or back again.

What moves is the storage, once, whatever the number of tensors saved of it; each of them is rebuilt as a view. A storage moves only while nothing but
saved tensors refers to it, so nobody can write to it afterwards, and what was written before is copied along, as the plain run would find it.
"""

import dataclasses
import enum
import weakref
from typing import TYPE_CHECKING

import torch

from tightfit.engine.host_slab import Part
from tightfit.torch_hooks.manifest import STORAGE_USES

if TYPE_CHECKING:
    from tightfit.engine.copy_engines import Ticket
    from tightfit.engine.disk.disk_slab import DiskPart
    from tightfit.engine.saved.block_call import BlockCall

_USES_OF_A_NAME = 1
"""What a reference from Python to the storage itself counts, beside those of its tensors."""


class Place(enum.Enum):
    """Where the bytes of a storage are. `HOST`: there or on disk. `LEAVING`: on both sides, until the copy to the host is over; `COMING` likewise."""

    CARD = enum.auto()
    LEAVING = enum.auto()
    HOST = enum.auto()
    COMING = enum.auto()
    BACK = enum.auto()


class Saved:
    """One tensor that autograd saved: what its hooks hold in place of it.

    `tensor` is the tensor, detached, until its storage moves; `version` that of the tensor when it was saved.
    """

    __slots__ = ("__weakref__", "dtype", "is_changed", "offset", "shape", "storage", "stride", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, storage: "SavedStorage | None") -> None:
        # Detached, or a result that is saved would refer to itself through the node that saved it. What no node has made is kept
        # itself, as autograd keeps it: a program that sets its `data` (a weight, a buffer) means what is saved too.
        self.tensor: torch.Tensor | None = tensor if tensor.grad_fn is None else tensor.detach()
        # An inference tensor has no version: it cannot be written to in place outside of inference mode.
        self.version = -1 if tensor.is_inference() else tensor._version
        self.storage = storage
        self.is_changed = False
        self.shape, self.dtype = tensor.shape, tensor.dtype
        if storage is not None:
            self.stride, self.offset = tensor.stride(), tensor.storage_offset()

    def leave(self) -> None:
        """Drops the tensor, as its storage is at the host."""
        assert self.tensor is not None
        self.is_changed = self.tensor._version != self.version
        self.tensor = None

    @property
    def is_written_to(self) -> bool:
        """Whether somebody has written to the tensor since it was saved."""
        return self.is_changed or (
            self.version >= 0 and self.tensor is not None and self.tensor._version != self.version
        )

    def check(self) -> None:
        """Raises autograd's error for a tensor that was written to after it was saved (torch/csrc/autograd/saved_variable.cpp), which hooks switch off.

        Raises:
            RuntimeError: it was.
        """
        if self.is_written_to:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {tuple(self.shape)} and {self.dtype} that was saved for the backward pass"
            )

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The tensor on the bytes `whole` of its storage."""
        usable = whole[: len(whole) // self.dtype.itemsize * self.dtype.itemsize]
        # Neither a view nor written to, as a program that runs again from it may ask.
        return usable.view(self.dtype).as_strided(self.shape, self.stride, self.offset).data


@dataclasses.dataclass(slots=True, kw_only=True, weakref_slot=True, eq=False)
class SavedStorage:
    """A storage of `num_bytes` that a call of a block saved. `on_card` has its bytes while it leaves, and again once it is back; `part` those at the host.

    `ticket` is the copy that is under way: of a storage that comes back it has to be waited for before its first use.
    """

    num_bytes: int
    call: "BlockCall"
    place: Place = Place.CARD
    saved: list["weakref.ref[Saved]"] = dataclasses.field(default_factory=list)
    on_card: torch.Tensor | None = None
    part: "Part | DiskPart | None" = None
    ticket: "Ticket | None" = None
    checksum: torch.Tensor | None = None
    """Of its bytes when it left, where that is compared with what comes back."""

    def living(self) -> list[Saved]:
        """The tensors that are still saved of it."""
        return [saved for reference in self.saved if (saved := reference()) is not None]

    def is_ours_alone(self) -> bool:
        """Whether nothing but saved tensors refers to it."""
        living = self.living()
        if not living or any(saved.tensor is None for saved in living):
            return False
        first = living[0].tensor
        assert first is not None
        storage = first.untyped_storage()
        # What is not resizable is memory that came from elsewhere (numpy, DLPack), which may be written to there.
        return storage.resizable() and STORAGE_USES.call(storage._cdata) == len(living) + _USES_OF_A_NAME

    def bytes_on_card(self) -> torch.Tensor:
        """All of its bytes, uint8, of shape (num_bytes,); `is_ours_alone` has to be true."""
        first = self.living()[0].tensor
        assert first is not None
        num_elements = self.num_bytes // first.element_size()
        return first.as_strided((num_elements,), (1,), 0).view(torch.uint8)
