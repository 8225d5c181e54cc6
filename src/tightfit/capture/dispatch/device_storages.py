"""The storages of virtual tensors, recorded as allocated and freed as the caching allocator would see it."""

import weakref
from collections.abc import Collection, Iterable

import torch
from torch._subclasses.fake_tensor import FakeTensor

from tightfit.capture.dispatch import sparse
from tightfit.capture.dispatch.values.data_dependent_conditions import DataDependentConditions
from tightfit.capture.dispatch.values.known_values import KnownValues
from tightfit.capture.observe.recorder import Recorder
from tightfit.tape import Category


# A storage and not a tensor is what the caching allocator knows: views and detached aliases share one, and its
# end is the moment the block is freed.
class StorageReference(weakref.ref[torch.UntypedStorage]):
    """A weak reference to a storage that knows the storage's index on the tape."""

    __slots__ = ("address", "index")

    address: int
    index: int


class DeviceStorages:
    """The storages on the virtual card that are alive. `known_values` and `conditions` say what is known of their contents, until they are freed."""

    def __init__(self, recorder: Recorder, known_values: KnownValues, conditions: DataDependentConditions) -> None:
        self.references: dict[int, StorageReference] = {}
        """By address."""
        self._recorder = recorder
        self._known_values = known_values
        self._conditions = conditions

    def add(self, tensor: torch.Tensor, category: Category = Category.TEMPORARIES) -> None:
        """Records the storage of `tensor` as allocated, if it is a new one on the device."""
        if tensor.layout != torch.strided:
            for part in sparse.parts(tensor):
                self.add(part, category)
            return
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self.references:
            return
        # One that is not followed, of no bytes or at the host, was freed here without a word.
        self._known_values.forget(address)
        self._conditions.forget(address)
        if tensor.device.type != "cuda":
            return
        num_bytes = storage.nbytes()
        # The caching allocator hands out no block for 0 bytes (CUDACachingAllocator.cpp, `allocate`).
        if num_bytes:
            reference = StorageReference(storage, self._freed)
            reference.address, reference.index = address, self._recorder.allocate(num_bytes, category)
            self.references[address] = reference

    def follow(self, tensor: torch.Tensor, index: int) -> None:
        """Takes the storage of `tensor` for the one with that index, which the tape has as allocated already."""
        storage = tensor.untyped_storage()
        reference = StorageReference(storage, self._freed)
        reference.address, reference.index = storage._cdata, index
        self._known_values.forget(reference.address)
        self._conditions.forget(reference.address)
        self.references[reference.address] = reference

    def unfollow(self, indices: Collection[int]) -> set[int]:
        """Leaves it to the caller to record these storages as freed; returns those of them that were alive."""
        found = [reference for reference in self.references.values() if reference.index in indices]
        for reference in found:
            self._freed(reference, is_noted=False)
        return {reference.index for reference in found}

    def _freed(self, reference: StorageReference, *, is_noted: bool = True) -> None:
        # All that is known by the address goes with it: another storage may be made there at once.
        del self.references[reference.address]
        self._known_values.forget(reference.address)
        self._conditions.forget(reference.address)
        if is_noted:
            self._recorder.free(reference.index)

    def mark(self, tensors: Iterable[torch.Tensor], category: Category) -> None:
        """What was temporary, or saved for backward, of `tensors` counts as `category`."""
        categories = self._recorder.storages["category"]
        for index in map(self.index_of, tensors):
            if index is not None and categories[index] in (Category.TEMPORARIES, Category.ACTIVATIONS):
                categories[index] = category

    def resize_storage(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """A program has given a storage another size itself (`UntypedStorage.resize_`), as FSDP does to free the parameters that it has gathered."""
        former = self.references.get(storage._cdata)
        # The contents are copied: the former block is freed after the new one is there (aten/src/ATen/native/cuda/Resize.cpp, `resize_bytes_cuda`).
        index = self._recorder.allocate(num_bytes, Category.COMMUNICATION) if num_bytes else None
        if former is not None:
            self._freed(former)
        if index is not None:
            reference = StorageReference(storage, self._freed)
            reference.address, reference.index = storage._cdata, index
            self.references[storage._cdata] = reference

    def resize(self, tensor: torch.Tensor) -> None:
        """An operator may have given the storage of `tensor` another size."""
        storage = tensor.untyped_storage()
        reference = self.references.get(storage._cdata)
        if reference is None:
            self.add(tensor)
        # Storages only grow: `resize_` to fewer elements keeps the block (aten/src/ATen/native/cuda/Resize.h,
        # `maybe_resize_storage_cuda`).
        elif self._recorder.storages["num_bytes"][reference.index] < storage.nbytes():
            # The contents are copied to the new block before the former one is freed (`resize_bytes_cuda` in the same folder).
            self._freed(reference, is_noted=False)
            self.add(tensor)
            self._recorder.free(reference.index)

    def index_of(self, tensor: torch.Tensor) -> int | None:
        """The tape's index of the storage of `tensor`, if it is on the device."""
        if not isinstance(tensor, FakeTensor) or tensor.layout != torch.strided:
            return None
        reference = self.references.get(tensor.untyped_storage()._cdata)
        return reference.index if reference else None

    def indices(self) -> list[int]:
        """The tape's indices of all storages that are alive."""
        return [reference.index for reference in self.references.values()]

    def alive_bytes(self) -> int:
        """The bytes of all storages that are alive."""
        num_bytes = self._recorder.storages["num_bytes"]
        return sum(num_bytes[index] for index in self.indices())
