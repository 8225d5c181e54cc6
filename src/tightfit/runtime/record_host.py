"""Records tensors on the host, without a card: when their storages are allocated and freed (`tightfit.runtime.storage_watch`), and on which lines."""

import sys
import time
import weakref
from collections.abc import Iterable
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from tightfit.runtime.record_hooks import HeldTensors, RunHooks, all_tensors
from tightfit.runtime.recorded import HostEvent, HostRun, Note, NoteKind, is_own_frame
from tightfit.runtime.storage_watch import SeenStorage, StorageWatch

_DEAD = -1
_TORCH = Path(torch.__file__).parent
# The frames between an operator and this file.
_BETWEEN = tuple(str(_TORCH / name) for name in ("_compile.py", "_dynamo/eval_frame.py"))


class _NumberedStorage(SeenStorage):
    """The reference to a storage with its number. `clock` is a second one, whose callback logs the time before this one is logged:
    callbacks run from the youngest reference to the oldest.
    """

    __slots__ = ("clock", "number")

    clock: weakref.ref[torch.UntypedStorage]
    number: int


class _CallStacks:
    """The Python call stacks of a run, numbered in the order in which they were first seen; all of them are empty unless `are_wanted`."""

    def __init__(self, *, are_wanted: bool) -> None:
        self._are_wanted = are_wanted
        # By identity: functions that are written alike have equal code, whatever their files.
        self._codes: dict[int, CodeType] = {}
        self._numbers: dict[tuple[tuple[int, int], ...], int] = {}

    def number(self) -> int:
        """The number of the current stack, without this package's own frames."""
        frame = sys._getframe(1) if self._are_wanted else None
        stack = []
        while frame is not None:
            file = frame.f_code.co_filename
            if not is_own_frame(file) and (stack or file not in _BETWEEN):
                self._codes[id(frame.f_code)] = frame.f_code
                stack.append((id(frame.f_code), frame.f_lineno))
            frame = frame.f_back
        return self._numbers.setdefault(tuple(stack), len(self._numbers))

    def as_frames(self) -> list[list[dict[str, Any]]]:
        """The stacks by their numbers, each from the innermost frame outwards."""
        return [
            [
                {"filename": code.co_filename, "line": line, "name": code.co_name}
                for code, line in ((self._codes[number], line) for number, line in stack)
            ]
            for stack in self._numbers
        ]


class HostRecorder(StorageWatch[_NumberedStorage]):
    """Records when the storages of this process's host tensors are allocated and freed."""

    def __init__(self, *, stacks: bool) -> None:
        super().__init__("the recorder")
        self.hooks = RunHooks(self._note)
        self._events: list[HostEvent | Note] = []
        self._num_storages = 0
        self._num_at_start = 0
        self._is_on = False
        self._stacks = _CallStacks(are_wanted=stacks)

    def start(self) -> None:
        """Starts recording; existing tensors are recorded as allocated before the start. An interrupt leaves no hooks behind."""
        for tensor in all_tensors():
            self.see(tensor)
        self.work_off()
        self._num_at_start = len(self._events)
        try:
            self.hooks.install()
            self.__enter__()
            self._is_on = True
        except BaseException:
            self.hooks.remove()
            raise

    def stop(self) -> HostRun:
        """Ends the recording and returns it."""
        if self._is_on:
            self._is_on = False
            self.__exit__(None, None, None)
        self.hooks.remove()
        self.work_off()
        self._references.clear()
        return HostRun(
            events=self._events,
            num_at_start=self._num_at_start,
            stacks=self._stacks.as_frames(),
        )

    def has_storage(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` has its own storage on the host: it is neither a wrapper subclass, a compiler's fake tensor, nor a parameter that a lazy module
        has not made yet.
        """
        if is_lazy(tensor):
            return False
        is_dispatched = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
        return tensor.device.type == "cpu" and tensor.layout == torch.strided and not is_dispatched

    def refer(self, storage: torch.UntypedStorage) -> _NumberedStorage:
        """A reference with the next number."""
        reference = _NumberedStorage(storage, self._deaths.note)
        reference.clock = weakref.ref(storage, self._deaths.note_time)
        reference.number = self._num_storages
        self._num_storages += 1
        return reference

    def added(self, reference: _NumberedStorage, tensor: torch.Tensor) -> None:
        """Records an allocation."""
        self._add(reference.number, reference.num_bytes, self._stacks.number(), time.time_ns())

    def freed(self, reference: _NumberedStorage, time_ns: int) -> None:
        """Records a free."""
        self._add(reference.number, _DEAD, 0, time_ns)

    def _add(self, storage: int, num_bytes: int, stack: int, time_ns: int) -> None:
        self._events.append(HostEvent(storage=storage, num_bytes=num_bytes, stack=stack, time_us=time_ns // 1000))

    def _note(self, kind: NoteKind, text: str, held: HeldTensors) -> None:
        self.work_off()
        numbers = tuple((category, tuple(self._numbers(tensors))) for category, tensors in held.items())
        self._events.append(Note(kind=kind, text=text, time_us=time.time_ns() // 1000, held=numbers))

    def _numbers(self, tensors: Iterable[torch.Tensor]) -> Iterable[int]:
        for tensor in tensors:
            reference = self.reference_of(tensor)
            if reference is not None:
                yield reference.number
