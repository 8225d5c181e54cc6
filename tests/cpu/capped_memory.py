"""A simulated card of a few megabytes: a mode that raises an out-of-memory error where the storages that are alive would exceed what other processes leave."""

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class CappedMemory(TorchDispatchMode):
    """Storages that are made while it is on share `capacity` bytes with those of `others`, which may be set at any time."""

    # As what lies below torch: what is refused inside of a mode of the program's is not to be so here.
    __module__ = "torch.capped"

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.others = 0
        self.peak = 0
        self.num_failures = 0
        self._capacity = capacity
        self._living: dict[int, tuple[StorageWeakRef, int]] = {}

    @property
    def free(self) -> int:
        """Bytes that nobody has."""
        return self._capacity - self.others - self._used()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        made = {
            storage._cdata: storage
            for t in tree_leaves(result)
            if isinstance(t, torch.Tensor) and (storage := t.untyped_storage())._cdata not in given
        }
        new = {
            key: storage for key, storage in made.items() if key not in self._living or self._living[key][0].expired()
        }
        num_bytes = sum(storage.nbytes() for storage in new.values())
        if num_bytes > self.free:
            self.num_failures += 1
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {num_bytes} bytes.")
        self._living |= {key: (StorageWeakRef(storage), storage.nbytes()) for key, storage in new.items()}
        self.peak = max(self.peak, self._used())
        return result

    def _used(self) -> int:
        self._living = {key: each for key, each in self._living.items() if not each[0].expired()}
        return sum(num_bytes for _, num_bytes in self._living.values())
