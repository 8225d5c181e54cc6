"""Sees the storages of tensors come and go: a dispatch mode looks at each operator's inputs and outputs, weak references see storages being freed.

A free is noted when it happens (`tightfit.torch_hooks.weak_references`) and worked off before the next storage is added, so that the order is the
run's. Scratch memory of kernels is not seen. A tensor that no operator made, such as one over a numpy array, is seen when an operator first reads it.
"""

import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tightfit.errors.faults import internal_error, note
from tightfit.torch_hooks.weak_references import Deaths


class SeenStorage(weakref.ref[torch.UntypedStorage]):
    """A weak reference to a storage; `cdata` is the address by which torch knows it, which a later storage may have too."""

    __slots__ = ("cdata", "num_bytes")

    cdata: int
    num_bytes: int


Reference = TypeVar("Reference", bound=SeenStorage)


class StorageWatch(TorchDispatchMode, Generic[Reference]):
    """Knows the live storages of a block. What is a storage of interest, and what is noted of it, is said by those who derive from this."""

    # Flex attention and checkpointing under torch.compile are higher-order operators, which torch refuses under
    # modes that do not say so.
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Under any other mode torch does not compile, and flex attention, which insists on it, fails."""
        return True

    def __init__(self, name: str) -> None:
        """`name` is what an error of our own says it was met in."""
        super().__init__()
        self._name = name
        self._references: dict[int, Reference] = {}
        self._deaths = Deaths()

    def has_storage(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` has a storage of its own that is of interest."""
        raise NotImplementedError

    def refer(self, storage: torch.UntypedStorage) -> Reference:
        """A reference to a storage that is seen for the first time, whose deaths are noted in `self._deaths`."""
        raise NotImplementedError

    def added(self, reference: Reference, tensor: torch.Tensor) -> None:
        """A storage was seen for the first time, or has another size now, as that of `tensor`."""
        raise NotImplementedError

    def freed(self, reference: Reference, time_ns: int) -> None:
        """A storage was freed, or has another size now; `time_ns` is when, as `time.time_ns`."""
        raise NotImplementedError

    def reference_of(self, tensor: torch.Tensor) -> Reference | None:
        """What refers to the storage of a tensor, if that was seen."""
        return self._references.get(tensor.untyped_storage()._cdata) if self.has_storage(tensor) else None

    def see(self, tensor: torch.Tensor) -> None:
        """Adds the storage of a tensor, if it is a new one."""
        if not self.has_storage(tensor):
            return
        self.work_off()
        storage = tensor.untyped_storage()
        known, num_bytes = self._references.get(storage._cdata), storage.nbytes()
        if known is not None and known.num_bytes == num_bytes:
            return
        if known is not None:
            self._take_out(known, time.time_ns())
        reference = self.refer(storage)
        reference.cdata, reference.num_bytes = storage._cdata, num_bytes
        self._references[reference.cdata] = reference
        self.added(reference, tensor)

    def work_off(self) -> None:
        """Takes out the storages that were freed since the last call."""
        for reference, time_ns in self._deaths:
            assert isinstance(reference, SeenStorage)
            # A resized storage has a newer reference by now, and a storage that was freed before its address
            # was used again is handled before that.
            known = self._references.get(reference.cdata)
            if known is not None and known is reference:
                self._take_out(known, time_ns)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs the operator unchanged, and looks at its inputs and outputs."""
        self._see_all(args)
        result = func(*args, **(kwargs or {}))
        self._see_all((result,))
        return result

    def _see_all(self, values: Iterable[Any]) -> None:
        try:
            for tensor in tensors_in(values):
                self.see(tensor)
        except Exception as error:
            # The program may swallow it, and nothing of the program's runs here.
            own = internal_error(error, self._name)
            note(own, self._name)
            raise own from error

    def _take_out(self, reference: Reference, time_ns: int) -> None:
        self._references.pop(reference.cdata, None)
        self.freed(reference, time_ns)


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among values, and in lists and tuples of them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)
