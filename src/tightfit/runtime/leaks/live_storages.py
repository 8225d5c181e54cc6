"""Knows which storages were allocated in a block, on which line, in which step, and are alive: a dispatch mode sees each operator's outputs.

On the host, on a card and on a virtual GPU alike. Nothing is kept alive: storages are referred to weakly, and a freed one is worked off
before the next operator or step.
"""

import dataclasses
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from types import CodeType, FrameType
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from tightfit.capture.observe.attribution import short
from tightfit.capture.processes.process_role import is_simulated
from tightfit.runtime.leaks.named_roots import is_users_or_test
from tightfit.runtime.leaks.object_edges import parts_of_sparse
from tightfit.runtime.record_hooks import all_tensors
from tightfit.runtime.storage_watch import SeenStorage, StorageWatch, tensors_in

_MAX_FRAMES = 12
BEFORE = -1
"""The site of what was there before the block."""

Stack = tuple[tuple[int, int], ...]
"""Frames as the identities of their code, and lines."""


class StorageRow(SeenStorage):
    """A weak reference to a storage, with what is known of it: `site` is the number of its stack, `step` when it was allocated, and `is_carried` whether it
    was made of what an earlier step had left (`buffer = torch.cat([buffer, x])`), but for the first one."""

    __slots__ = ("device", "is_carried", "site", "step")

    device: str
    site: int
    step: int
    is_carried: bool


@dataclasses.dataclass(frozen=True, slots=True)
class _Stacks:
    """The stacks of the user's frames, numbered in the order in which they were first seen.

    `codes` are those met, by identity, and whether they are the user's: functions that are written alike have equal code, whatever their files.
    """

    numbers: dict[Stack, int] = dataclasses.field(default_factory=dict)
    codes: dict[int, tuple[CodeType, bool]] = dataclasses.field(default_factory=dict)

    def number(self, thread: int) -> int:
        """The number of the current stack; of the stack of `thread` where this one has no frame of the user's, as in autograd's threads."""
        stack = self._users(sys._getframe(2))
        if not stack and thread != threading.get_ident():
            stack = self._users(sys._current_frames().get(thread))
        return self.numbers.setdefault(tuple(stack), len(self.numbers))

    def _users(self, frame: FrameType | None) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        while frame is not None and len(found) < _MAX_FRAMES:
            code = frame.f_code
            known = self.codes.get(id(code))
            if known is None:
                known = self.codes[id(code)] = code, is_users_or_test(code.co_filename)
            if known[1]:
                found.append((id(code), frame.f_lineno))
            frame = frame.f_back
        return found


class LiveStorages(StorageWatch[StorageRow]):
    """The live storages of a block by allocation site. `step` is set by whoever counts steps."""

    def __init__(self) -> None:
        super().__init__("the search for leaks")
        self.step = 0
        self.bytes_by_site: Counter[int] = Counter()
        self.bytes_by_device: Counter[str] = Counter()
        self._stacks = _Stacks()
        self._thread = threading.get_ident()
        self._sees_fakes = is_simulated()
        self._is_before = False
        self._inputs: Sequence[Any] = ()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs the operator unchanged; its inputs are known while its outputs are looked at, and not kept."""
        self._inputs = args
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._inputs = ()

    def see(self, tensor: torch.Tensor) -> None:
        """Adds the storage of a tensor, or those of a sparse one, which no operator has returned."""
        if type(tensor) is torch.Tensor and tensor.layout is not torch.strided:
            for _, part in parts_of_sparse(tensor):
                super().see(part)
        else:
            super().see(tensor)

    def see_existing(self) -> None:
        """What Python knows to be there counts as before the block."""
        self._is_before = True
        for tensor in all_tensors():
            self.see(tensor)
        self._is_before = False

    def rows(self) -> list[StorageRow]:
        """The live storages."""
        self.work_off()
        return list(self._references.values())

    def is_unseen_on_host(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of the host is none of `rows`, as those that other threads make: a dispatch mode is of one thread."""
        return self.has_storage(tensor) and tensor.device.type == "cpu" and self.reference_of(tensor) is None

    def frames_of(self, site: int) -> list[tuple[str, str]]:
        """Lines (`train.py:41`) and functions of a site, the innermost first; empty where no frame was the user's."""
        stack = next(stack for stack, number in self._stacks.numbers.items() if number == site)
        codes = [(self._stacks.codes[number][0], line) for number, line in stack]
        return [(f"{short(code.co_filename)}:{line}", code.co_qualname) for code, line in codes]

    def storage_id(self, tensor: torch.Tensor) -> int | None:
        """The key of the storage of a tensor among `rows`; None where it has none of its own."""
        return tensor.untyped_storage()._cdata if self.has_storage(tensor) else None

    def has_storage(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` has a storage of its own: it is neither a wrapper subclass, nor a compiler's fake tensor (those of a virtual GPU count), nor a
        parameter that is not initialised yet.
        """
        if is_lazy(tensor):
            return False
        is_dispatched = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
        is_virtual = self._sees_fakes and tensor.device.type == "cuda"
        return tensor.layout == torch.strided and (is_virtual or not is_dispatched) and tensor.device.type != "meta"

    def refer(self, storage: torch.UntypedStorage) -> StorageRow:
        """A row of a new storage."""
        return StorageRow(storage, self._deaths.note)

    def added(self, reference: StorageRow, tensor: torch.Tensor) -> None:
        """Counts a new storage at the line that runs."""
        reference.step, reference.device, reference.is_carried = self.step, tensor.device.type, False
        inputs = (self.reference_of(each) for each in tensors_in(self._inputs))
        reference.is_carried = any(row is not None and (row.is_carried or 0 < row.step < self.step) for row in inputs)
        reference.site = BEFORE if self._is_before else self._stacks.number(self._thread)
        self.bytes_by_site[reference.site] += reference.num_bytes
        self.bytes_by_device[reference.device] += reference.num_bytes

    def freed(self, reference: StorageRow, time_ns: int) -> None:
        """Counts a storage no longer."""
        self.bytes_by_site[reference.site] -= reference.num_bytes
        self.bytes_by_device[reference.device] -= reference.num_bytes
