"""Knows which storages were allocated in a block, on which line, in which step, and are alive: a dispatch mode sees each operator's outputs.

On the host, on a card and on a virtual GPU alike. Nothing is kept alive: storages are referred to weakly, and a freed one is worked off
before the next operator or step.
"""

import dataclasses
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from tightfit.capture.observe.attribution import short
from tightfit.capture.processes.simulated import is_simulated
from tightfit.errors.faults import internal_error, note
from tightfit.runtime.leaks.named_roots import is_users_or_test
from tightfit.runtime.record_hooks import all_tensors
from tightfit.torch_hooks.weak_references import Deaths

_MAX_FRAMES = 12
BEFORE = -1
"""The site of what was there before the block."""

Stack = tuple[tuple[CodeType, int], ...]


class StorageRow(weakref.ref[torch.UntypedStorage]):
    """A weak reference to a storage, with what is known of it: `site` is the number of its stack, `step` when it was allocated."""

    __slots__ = ("cdata", "device", "num_bytes", "site", "step")

    cdata: int
    device: str
    num_bytes: int
    site: int
    step: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Stacks:
    """The stacks of the user's frames, numbered in the order in which they were first seen."""

    numbers: dict[Stack, int] = dataclasses.field(default_factory=dict)
    is_users: dict[CodeType, bool] = dataclasses.field(default_factory=dict)

    def number(self, thread: int) -> int:
        """The number of the current stack; of the stack of `thread` where this one has no frame of the user's, as in autograd's threads."""
        stack = self._users(sys._getframe(2))
        if not stack and thread != threading.get_ident():
            stack = self._users(sys._current_frames().get(thread))
        return self.numbers.setdefault(tuple(stack), len(self.numbers))

    def _users(self, frame: FrameType | None) -> list[tuple[CodeType, int]]:
        found: list[tuple[CodeType, int]] = []
        while frame is not None and len(found) < _MAX_FRAMES:
            code = frame.f_code
            is_users = self.is_users.get(code)
            if is_users is None:
                is_users = self.is_users[code] = is_users_or_test(code.co_filename)
            if is_users:
                found.append((code, frame.f_lineno))
            frame = frame.f_back
        return found


class LiveStorages(TorchDispatchMode):
    """The live storages of a block by allocation site. `step` is set by whoever counts steps."""

    # As `HostRecorder` has both, and for the same reasons.
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Under any other mode torch does not compile, and flex attention, which insists on it, fails."""
        return True

    def __init__(self) -> None:
        super().__init__()
        self.step = 0
        self.bytes_by_site: Counter[int] = Counter()
        self.bytes_by_device: Counter[str] = Counter()
        self._rows: dict[int, StorageRow] = {}
        self._deaths = Deaths()
        self._stacks = _Stacks()
        self._thread = threading.get_ident()
        self._sees_fakes = is_simulated()

    def see_existing(self) -> None:
        """What Python knows to be there counts as before the block."""
        for tensor in all_tensors():
            self._see(tensor, site=BEFORE)

    def rows(self) -> list[StorageRow]:
        """The live storages."""
        self.work_off()
        return list(self._rows.values())

    def frames_of(self, site: int) -> list[tuple[str, str]]:
        """Lines (`train.py:41`) and functions of a site, the innermost first; empty where no frame was the user's."""
        stack = next(stack for stack, number in self._stacks.numbers.items() if number == site)
        return [(f"{short(code.co_filename)}:{line}", code.co_qualname) for code, line in stack]

    def storage_id(self, tensor: torch.Tensor) -> int | None:
        """The key of the storage of a tensor among `rows`; None where it has none of its own."""
        return tensor.untyped_storage()._cdata if self._has_storage(tensor) else None

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs the operator unchanged, and looks at its inputs and outputs."""
        self._see_all(args)
        result = func(*args, **(kwargs or {}))
        self._see_all((result,))
        return result

    def work_off(self) -> None:
        """Takes out the storages that were freed since the last call."""
        for reference, _ in self._deaths:
            assert isinstance(reference, StorageRow)
            if self._rows.get(reference.cdata) is reference:
                self._remove(reference)

    def _see_all(self, values: Iterable[Any]) -> None:
        try:
            for tensor in _tensors(values):
                self._see(tensor)
        except Exception as error:
            # The program may swallow it, and nothing of the program's runs here.
            own = internal_error(error, "the search for leaks")
            note(own, "the search for leaks")
            raise own from error

    def _see(self, tensor: torch.Tensor, *, site: int | None = None) -> None:
        if not self._has_storage(tensor):
            return
        self.work_off()
        storage = tensor.untyped_storage()
        row, num_bytes = self._rows.get(storage._cdata), storage.nbytes()
        if row is not None and row.num_bytes == num_bytes:
            return
        if row is not None:
            self._remove(row)
        row = StorageRow(storage, self._deaths.note)
        row.cdata, row.num_bytes, row.step = storage._cdata, num_bytes, self.step
        row.device = tensor.device.type
        row.site = self._stacks.number(self._thread) if site is None else site
        self._rows[row.cdata] = row
        self.bytes_by_site[row.site] += num_bytes
        self.bytes_by_device[row.device] += num_bytes

    def _remove(self, row: StorageRow) -> None:
        del self._rows[row.cdata]
        self.bytes_by_site[row.site] -= row.num_bytes
        self.bytes_by_device[row.device] -= row.num_bytes

    def _has_storage(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` has a storage of its own: it is neither a wrapper subclass, nor a compiler's fake tensor (those of a virtual GPU count), nor a
        parameter that is not initialised yet.
        """
        if is_lazy(tensor):
            return False
        is_dispatched = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
        is_virtual = self._sees_fakes and tensor.device.type == "cuda"
        return tensor.layout == torch.strided and (is_virtual or not is_dispatched) and tensor.device.type != "meta"


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
