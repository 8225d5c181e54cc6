"""Which storages are saved, by their addresses: tensors that share one are saved of it once."""

import threading
import weakref

import torch
from torch._subclasses.fake_tensor import FakeTensor

from tightfit.engine.saved.block_call import BlockCall
from tightfit.engine.saved.saved_storage import Place, SavedStorage


class KnownStorages:
    """The storages on `device` that calls have saved; `lock` is that of `SavedTensors`."""

    def __init__(self, device: torch.device, lock: "threading.RLock") -> None:
        self._device = device
        self._lock = lock
        # By address, which another storage has after the first is gone.
        self._storages: dict[int, weakref.ref[SavedStorage]] = {}
        self._num_looked_at = 0

    def saved_of(self, call: BlockCall, tensor: torch.Tensor, *, is_made: bool) -> SavedStorage | None:
        """The storage of `tensor`; None if it stays where it is: what no node has made is a weight, a buffer or a batch, and not of the block, unless it
        `is_made` by an operator of the block."""
        selection = call.selection
        if selection is None or tensor.device != self._device or not _is_plain(tensor):
            return None
        if not is_made and _is_made_by_none(tensor):
            return None
        storage = tensor.untyped_storage()
        num_bytes, key = storage.nbytes(), storage._cdata
        if num_bytes < selection.smallest_bytes or num_bytes % tensor.element_size():
            return None
        with self._lock:
            reference = self._storages.get(key)
            known = None if reference is None else reference()
            if known is None or known.place is not Place.CARD or not known.living():
                known = SavedStorage(num_bytes=num_bytes, call=call)
                self._storages[key] = weakref.ref(known)
                call.add(known)
            return known

    def forget_gone(self) -> None:
        """Drops the storages that nothing is saved of any more."""
        # Asked at the border of each block: what is looked at pays for itself by what was added since.
        if len(self._storages) < 2 * self._num_looked_at:
            return
        # No weak dictionary, whose callbacks are code in which an interrupt could be lost.
        self._storages = {key: reference for key, reference in self._storages.items() if reference() is not None}
        self._num_looked_at = len(self._storages)


def _is_made_by_none(tensor: torch.Tensor) -> bool:
    """Whether no node has made the tensor, or what it is a view of (`weight.t()`)."""
    base = tensor._base
    return tensor.grad_fn is None or (base is not None and base.grad_fn is None)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a view of one storage and nothing else; on the virtual GPU tensors are fake."""
    return (
        type(tensor) in (torch.Tensor, FakeTensor)
        and tensor.layout == torch.strided
        and not tensor.is_nested
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.is_inference()
        and not tensor._is_zerotensor()
    )
