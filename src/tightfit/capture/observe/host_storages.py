"""Which tensors count as host memory, pageable or page-locked: their storages until they are freed, and memory that the program registers itself."""

import weakref

import torch

from tightfit.allocator.pinned_host import PinnedHostAllocator
from tightfit.errors.faults import for_torch

_Reference = weakref.ref[torch.UntypedStorage]


class HostBytes:
    """The bytes of tensors on the host, and the peak of these and of what torch's allocator of pinned memory has reserved."""

    def __init__(self) -> None:
        self.num_bytes = 0
        """In pageable memory, or registered by the program."""
        self.pinned = PinnedHostAllocator()
        self.on_disk: set[int] = set()
        """Where memory begins that is mapped from files of techniques."""
        self.peak_bytes = 0

    def hold(self, num_bytes: int) -> None:
        """Tensors have grown, or shrunk, by `num_bytes`."""
        self.num_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.num_bytes + self.pinned.reserved_bytes)

    def pin(self, num_bytes: int) -> None:
        """A tensor in memory that torch pins."""
        self.pinned.malloc(num_bytes)
        self.hold(0)


class HostStorages:
    """The storages of a trace at the host, counted while they live, and which of them are page-locked."""

    def __init__(self, host: HostBytes) -> None:
        self._host = host
        self._held: dict[int, _Reference] = {}
        self._pinned: dict[int, _Reference] = {}
        self._registered: dict[int, tuple[int, int]] = {}  # by address: the bytes, and how many of them count here

    def pinned_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """`Tensor.pin_memory`."""
        if tensor.device.type == "cuda":
            kind = tensor.type().replace("privateuseone", "cuda")
            raise for_torch(RuntimeError(f"cannot pin '{kind}' only dense CPU tensors can be pinned"))
        return tensor if self.is_pinned(tensor) else self.pinned(tensor.clone())

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """`Tensor.is_pinned`: whether torch has pinned the storage, or the program has registered the memory where it begins."""
        if tensor.layout != torch.strided:
            return False
        storage = tensor.untyped_storage()
        return storage._cdata in self._pinned or self._is_registered(storage, 0, 1)

    def is_page_locked(self, tensor: torch.Tensor) -> bool:
        """Whether a card copies from or to `tensor`, which is dense, without the driver's own buffer."""
        if tensor.layout != torch.strided:
            return False
        storage = tensor.untyped_storage()
        begin = int(tensor.storage_offset()) * tensor.element_size()
        return storage._cdata in self._pinned or self._is_registered(storage, begin, tensor.nbytes)

    def _is_registered(self, storage: torch.UntypedStorage, begin: int, num_bytes: int) -> bool:
        if not self._registered or storage.device.type != "cpu":
            return False
        begin += storage.data_ptr()
        return any(
            address <= begin and begin + num_bytes <= address + size for address, (size, _) in self._registered.items()
        )

    def register(self, address: int, num_bytes: int) -> None:
        """`cudaHostRegister`: page-locks memory of the program, which counts from now on if no tensor has been counted there."""
        held = (reference() for reference in self._held.values())
        ranges = (_range(storage) for storage in held if storage is not None)
        is_counted = any(begin <= address < end for begin, end in ranges)
        self.unregister(address)
        self._registered[address] = (num_bytes, 0 if is_counted else num_bytes)
        self._host.hold(self._registered[address][1])

    def unregister(self, address: int) -> None:
        """`cudaHostUnregister`."""
        self._host.hold(-self._registered.pop(address, (0, 0))[1])

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, whose storage counts as one that torch has pinned from now on."""
        if tensor.layout != torch.strided or self.is_pinned(tensor):
            return tensor
        storage = tensor.untyped_storage()
        address, num_bytes, host = storage._cdata, storage.nbytes(), self._host
        if self._held.pop(address, None) is not None:
            host.hold(-num_bytes)
        host.pin(num_bytes)

        def gone(_reference: object) -> None:
            self._pinned.pop(address, None)
            host.pinned.free(num_bytes)

        self._pinned[address] = weakref.ref(storage, gone)
        return tensor

    def hold(self, tensor: torch.Tensor) -> None:
        """Counts the storage of a host tensor until it is freed."""
        if tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._held or address in self._pinned or storage.device.type != "cpu":
            return
        if self._host.on_disk and storage.data_ptr() in self._host.on_disk:
            return
        if self._is_registered(storage, 0, storage.nbytes()):
            # It counts since it was registered.
            return
        num_bytes = storage.nbytes()
        self._host.hold(num_bytes)

        def gone(_reference: object) -> None:
            self._held.pop(address, None)
            self._host.hold(-num_bytes)

        self._held[address] = weakref.ref(storage, gone)


def _range(storage: torch.UntypedStorage) -> tuple[int, int]:
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
