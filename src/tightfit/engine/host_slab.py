"""One block of page-locked host memory, of exactly the size that is asked for, from which parts are handed out.

torch's own pinned memory is rounded up to the next power of two and kept (`CachingHostAllocator`, aten/src/ATen/core/CachingHostAllocator.h), so a slab
of 33 GiB would take 64: ordinary memory is allocated here and registered with the driver (`cudaHostRegister`). Where that fails, as in a container with a
limit on locked memory, the memory is used as it is, and copies are slower.
"""

import contextlib
import dataclasses
import errno
import mmap
import weakref
from collections import deque
from typing import Any

import numpy as np
import torch

from tightfit.capture.processes.process_role import is_simulated
from tightfit.engine.free_ranges import FreeRanges
from tightfit.errors import ApplyError
from tightfit.units import format_bytes

_ALIGNMENT = 512


@dataclasses.dataclass(slots=True, kw_only=True, weakref_slot=True, eq=False)
class Part:
    """A part of a slab, or memory of its own where the slab is full: `bytes`, uint8, of shape (num_bytes,). It is given back when this object is gone."""

    bytes: torch.Tensor
    slab: "HostSlab"
    """Kept, since its memory is registered as long as it lives."""

    def with_storage(self) -> torch.Tensor:
        """The same memory as a storage of its own, with a version of its own: what is asked which tensors share memory (safetensors), or saves whole storages
        (`torch.save`), is not told of the slab. The part is kept as long as anything lies in that storage. On the virtual GPU, where the slab's pages are never
        filled, the storage is that of the slab."""
        return self.bytes.data if is_simulated() or not len(self.bytes) else torch.from_numpy(np.asarray(_Lent(self)))


class _Lent:
    """The bytes of a part as numpy takes them, which keeps the part with its array."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self.__array_interface__ = part.bytes.numpy().__array_interface__


class HostSlab:
    """`num_bytes` of host memory for a card; nothing is registered for a `near` device that is the host itself. A fork has no memory there where not `is_in_forks`."""

    def __init__(self, num_bytes: int, near: torch.device, *, is_in_forks: bool = True) -> None:
        unregister_gone()
        self.num_bytes = num_bytes
        self.is_registered = False
        self.overflow_bytes = 0
        """The most that was taken beside the slab, because it was full."""
        self._overflow = 0
        try:
            self._memory = _memory(num_bytes, is_in_forks=is_in_forks)
        except (RuntimeError, MemoryError) as error:
            raise ApplyError(
                f"the host has no {format_bytes(num_bytes)} of memory for what is moved there; plan with a smaller --host"
            ) from error
        self._free = FreeRanges(num_bytes, alignment=_ALIGNMENT)
        # References to parts that are gone, which may be at any time and in any thread; and where each part is.
        self._returned: deque[weakref.ref[Part]] = deque()
        self._handed_out: dict[weakref.ref[Part], tuple[int, int]] = {}
        if near.type == "cuda" and num_bytes:
            self._register(near)

    def take(self, num_bytes: int) -> Part:
        """A part of `num_bytes`; memory of its own, which is not page-locked, if no free range is large enough."""
        self._take_back()
        place = self._free.take(num_bytes)
        if place is None:
            return self._beside(num_bytes)
        part = Part(bytes=self._memory[place[0] : place[0] + num_bytes], slab=self)
        return self._given_back(part, place)

    @property
    def free_bytes(self) -> int:
        """What is not handed out."""
        self._take_back()
        return self._free.num_bytes

    def _beside(self, num_bytes: int) -> Part:
        part = Part(bytes=host_bytes(num_bytes), slab=self)
        self._overflow += num_bytes
        self.overflow_bytes = max(self.overflow_bytes, self._overflow)
        # A range of no length: nothing of the slab comes back.
        return self._given_back(part, (-num_bytes, 0))

    def _given_back(self, part: Part, place: tuple[int, int]) -> Part:
        # At its death the reference is appended to `_returned`, in C: in a callback of Python's an interrupt could be lost.
        note_death = self._returned.append
        self._handed_out[weakref.ref(part, note_death)] = place
        return part

    def _take_back(self) -> None:
        while self._returned:
            self._give_back(*self._handed_out.pop(self._returned.popleft()))

    def _give_back(self, begin: int, end: int) -> None:
        if begin < 0:
            self._overflow += begin
            return
        self._free.give_back(begin, end)

    def _register(self, near: torch.device) -> None:
        runtime: Any = torch.cuda.cudart()
        address = self._memory.data_ptr()
        # Of the card that is to see it (`engine.zero_copy`).
        with contextlib.nullcontext() if near.index is None else torch.cuda.device(near):
            self.is_registered = int(runtime.cudaHostRegister(address, self.num_bytes, 0)) == 0
        if self.is_registered:
            note_death = _GONE.append
            _REGISTERED[weakref.ref(self, note_death)] = (runtime, address, self._memory)
            return
        # The runtime keeps the failure for whoever asks next for the last error, which is the check after a kernel
        # (c10/cuda/CUDAException.h, `C10_CUDA_KERNEL_LAUNCH_CHECK`): asked for here, it is not taken for the program's.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=near).add_(1)


def _memory(num_bytes: int, *, is_in_forks: bool) -> torch.Tensor:
    if is_in_forks or not num_bytes or not hasattr(mmap, "MADV_DONTFORK"):
        return host_bytes(num_bytes)
    # What is written after a fork is a copy of the page, unless the kernel knows that a card reads it (a long-term pin, which drivers have not always made):
    # the card would go on reading the page of before.
    try:
        mapped = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise MemoryError from error
    mapped.madvise(mmap.MADV_DONTFORK)
    with torch.inference_mode(False):
        return torch.frombuffer(mapped, dtype=torch.uint8)


def host_bytes(num_bytes: int, *, is_pinned: bool = False) -> torch.Tensor:
    """Memory at the host, uint8, of shape (num_bytes,), which may be written to at any time: in inference mode torch would make it for that mode alone."""
    with torch.inference_mode(False):
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)


# The memory of slabs is kept until it is unregistered, which is done when the next slab is made or a session ends.
_REGISTERED: dict["weakref.ref[HostSlab]", tuple[Any, int, torch.Tensor]] = {}
_GONE: deque["weakref.ref[HostSlab]"] = deque()


def unregister_gone() -> None:
    """Gives the host memory of slabs that are gone back to the system."""
    while _GONE:
        runtime, address, _memory = _REGISTERED.pop(_GONE.popleft())
        runtime.cudaHostUnregister(address)
