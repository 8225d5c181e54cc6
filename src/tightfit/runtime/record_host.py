"""Records tensors on the host, without a card: a dispatch mode sees each operator's outputs, weak references see storages being freed.

A free is logged with its time when it happens (`tightfit.torch_hooks.weak_references`) and worked off before the next allocation or note, so that
the order is the run's. Scratch memory of kernels is not seen. A tensor that no operator made, such as one over a numpy array, counts as
allocated when an operator first reads it.
"""

import sys
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from tightfit.errors.faults import internal_error, note
from tightfit.runtime.record_hooks import HeldTensors, RunHooks, all_tensors
from tightfit.runtime.recorded import HostEvent, HostRun, Note, NoteKind, is_own_frame
from tightfit.torch_hooks.weak_references import Deaths

_DEAD = -1
_TORCH = Path(torch.__file__).parent
# The frames between an operator and this file.
_BETWEEN = tuple(str(_TORCH / name) for name in ("_compile.py", "_dynamo/eval_frame.py"))


class _StorageReference(weakref.ref[torch.UntypedStorage]):
    """A weak reference to a storage, with its number. `clock` is a second one, whose callback logs the time before this one is logged:
    callbacks run from the youngest reference to the oldest.
    """

    __slots__ = ("cdata", "clock", "num_bytes", "number")

    cdata: int
    clock: weakref.ref[torch.UntypedStorage]
    num_bytes: int
    number: int


class _CallStacks:
    """The Python call stacks of a run, numbered in the order in which they were first seen; all of them are empty unless `are_wanted`."""

    def __init__(self, *, are_wanted: bool) -> None:
        self._are_wanted = are_wanted
        self._numbers: dict[tuple[tuple[CodeType, int], ...], int] = {}

    def number(self) -> int:
        """The number of the current stack, without this package's own frames."""
        frame = sys._getframe(1) if self._are_wanted else None
        stack = []
        while frame is not None:
            file = frame.f_code.co_filename
            if not is_own_frame(file) and (stack or file not in _BETWEEN):
                stack.append((frame.f_code, frame.f_lineno))
            frame = frame.f_back
        return self._numbers.setdefault(tuple(stack), len(self._numbers))

    def as_frames(self) -> list[list[dict[str, Any]]]:
        """The stacks by their numbers, each from the innermost frame outwards."""
        return [
            [{"filename": code.co_filename, "line": line, "name": code.co_name} for code, line in stack]
            for stack in self._numbers
        ]


class HostRecorder(TorchDispatchMode):
    """Records when the storages of this process's host tensors are allocated and freed."""

    # Flex attention and checkpointing under torch.compile are higher-order operators, which torch refuses under
    # modes that do not say so.
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Under any other mode torch does not compile, and flex attention, which insists on it, fails."""
        return True

    def __init__(self, *, stacks: bool) -> None:
        super().__init__()
        self.hooks = RunHooks(self._note)
        self._events: list[HostEvent | Note] = []
        self._references: dict[int, _StorageReference] = {}
        self._deaths = Deaths()
        self._num_storages = 0
        self._num_at_start = 0
        self._is_on = False
        self._stacks = _CallStacks(are_wanted=stacks)

    def start(self) -> None:
        """Starts recording; existing tensors are recorded as allocated before the start. An interrupt leaves no hooks behind."""
        for tensor in all_tensors():
            self._see(tensor)
        self._work_off()
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
        self._work_off()
        self._references.clear()
        return HostRun(
            events=self._events,
            num_at_start=self._num_at_start,
            stacks=self._stacks.as_frames(),
        )

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs the operator unchanged, and records its inputs and outputs."""
        self._see_all(args)
        result = func(*args, **(kwargs or {}))
        self._see_all((result,))
        return result

    def _see_all(self, values: Iterable[Any]) -> None:
        try:
            for tensor in _tensors(values):
                self._see(tensor)
        except Exception as error:
            # The program may swallow it, and nothing of the program's runs here.
            own = internal_error(error, "the recorder")
            note(own, "the recorder")
            raise own from error

    def _see(self, tensor: torch.Tensor) -> None:
        if not _is_plain(tensor):
            return
        self._work_off()
        storage = tensor.untyped_storage()
        num_bytes = storage.nbytes()
        reference = self._references.get(storage._cdata)
        if reference is not None and reference.num_bytes == num_bytes:
            return
        if reference is not None:
            self._died(reference, time.time_ns())
        reference = _StorageReference(storage, self._deaths.note)
        reference.clock = weakref.ref(storage, self._deaths.note_time)
        reference.cdata, reference.num_bytes, reference.number = storage._cdata, num_bytes, self._num_storages
        self._num_storages += 1
        self._references[storage._cdata] = reference
        self._add(reference.number, num_bytes, self._stacks.number(), time.time_ns())

    def _work_off(self) -> None:
        """Records the storages that were freed since the last call."""
        for reference, time_ns in self._deaths:
            assert isinstance(reference, _StorageReference)
            # A resized storage has a newer reference by now, and a storage that was freed before its address
            # was used again is handled before that.
            if self._references.get(reference.cdata) is reference:
                self._died(reference, time_ns)

    def _died(self, reference: _StorageReference, time_ns: int) -> None:
        self._add(reference.number, _DEAD, 0, time_ns)
        self._references.pop(reference.cdata, None)

    def _add(self, storage: int, num_bytes: int, stack: int, time_ns: int) -> None:
        self._events.append(HostEvent(storage=storage, num_bytes=num_bytes, stack=stack, time_us=time_ns // 1000))

    def _note(self, kind: NoteKind, text: str, held: HeldTensors) -> None:
        self._work_off()
        numbers = tuple((category, tuple(self._numbers(tensors))) for category, tensors in held.items())
        self._events.append(Note(kind=kind, text=text, time_us=time.time_ns() // 1000, held=numbers))

    def _numbers(self, tensors: Iterable[torch.Tensor]) -> Iterable[int]:
        for tensor in tensors:
            if _is_plain(tensor):
                reference = self._references.get(tensor.untyped_storage()._cdata)
                if reference is not None:
                    yield reference.number


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether `tensor` has its own storage on the host: it is neither a wrapper subclass, a compiler's fake tensor, nor a parameter that a lazy module has
    not made yet.
    """
    if is_lazy(tensor):
        return False
    is_dispatched = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return tensor.device.type == "cpu" and tensor.layout == torch.strided and not is_dispatched


def _tensors(values: Iterable[Any]) -> Iterable[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
