"""Which functions of torch some code calls, in order: where they are others than in the run that was proved, the code has taken another way.

A graph has nothing of what is computed without gradients, and no snapshot has all that code may branch on (an array of numpy's, a counter in C, a level of
logging, the folder): with both the same, a block may begin to take off the mean over all rows, detached, or to scale by how many rows there are. Its calls show it; at the host, where operators take longer than a look at them, so do the operators.
"""

import contextlib
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import numpy as np
import torch
import torch.autograd.grad_mode
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tightfit.effects.dispatched import dispatched
from tightfit.effects.outside_calls import Unwatched
from tightfit.effects.users_code import FILES_OF_OURS
from tightfit.effects.values.contents import content_of
from tightfit.effects.values.lent_memory import HANDS_OUT, LentMemory, is_lent

WRITTEN_OUTSIDE = "a tensor outside the model's state was written to"
"""What `CallTrail.written_outside` has found, in words."""
# What a call says of how rows are taken: sizes, dimensions, indices, equations. Factors too, for the code may take them from the number of rows.
_TOLD = frozenset({int, bool, str, type(None)})
# A tensor that is made of a number of Python's or numpy's, or of few.
_MAKES_TENSOR = torch.ops.aten.lift_fresh.default
_LARGEST_NUMBERS_BYTES = 64
# Of arrays that tensors are made of: tables, and not data.
_LARGEST_TOLD_BYTES = 1 << 12
# By exact type first: `isinstance` takes longer, and most of what calls are given is one of these.
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_NESTED = frozenset({tuple, list})
# They say what a tensor is like, and make nothing: what the code does with it is told by its next calls.
SAYS_WHAT_IT_IS_LIKE = frozenset(
    {
        getattr(torch.Tensor, name).__get__
        for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "is_cuda", "is_sparse")
    }
    | {torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.stride, torch.Tensor.is_contiguous}
)
"""Functions of torch that need no note."""
_UNCOUNTED = -1
_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
# What is called here is called by who enters a context such as `torch.no_grad()`, or calls an operator.
_PASS_ON = frozenset({torch.autograd.grad_mode.__file__, OpOverload.__call__.__code__.co_filename})
# By file: whether the code there is of none of these.
_IS_CODE_OF_OTHERS: dict[str, bool] = {}


@final
class CallTrail:
    """The calls of one run. Tensors are told apart by numbers, in the order in which they are first met: another one of two is another way."""

    def __init__(self) -> None:
        self._calls: list[Any] = []
        # By `id`, as long as they live.
        self._tensors: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        # Those that the code has from before, with their versions then.
        self._outside: list[tuple[weakref.ref[torch.Tensor], int]] = []
        # The same memory by another name, with a version of its own: a write by it is in no other.
        self._data_of_outside: list[tuple[weakref.ref[torch.Tensor], torch.Tensor]] = []
        self._of_next_data: weakref.ref[torch.Tensor] | None = None
        # Python has one hash for -1 and -2.
        self._last_number = -2
        self.lent = LentMemory()

    def note(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> None:
        """Adds a call that the caller of this, a `__torch_function__`, handles, unless our own code makes it."""
        # There is none where a thread of autograd's calls a hook that is a function in C.
        frame = sys._getframe(1).f_back
        if frame is not None and not _IS_CODE_OF_OTHERS.get(frame.f_code.co_filename) and _is_ours(frame):
            return
        if func in HANDS_OUT and args:
            self.lent.hand_out(func, args[0])
        # A function that is made anew for each call has the same code.
        self._calls.append(getattr(func, "__code__", func))
        self._add(args)
        if func == _DATA:
            self._of_next_data = next((each for each, _ in self._outside if each() is args[0]), None)
        if kwargs:
            for name, value in kwargs.items():
                self._calls.append(name)
                self._add((value,))

    def made(self, result: Any) -> Any:
        """Numbers the tensors that a call has returned, and returns them."""
        kind = type(result)
        if self._of_next_data is not None:
            self._data_of_outside.append((self._of_next_data, result))
            self._of_next_data = None
        if kind in _TENSORS:
            # As `_number_of` does: each function of torch comes by here.
            known = self._tensors.get(id(result))
            if known is None or known[0]() is not result:
                self._last_number = number = self._last_number - 1
                self._tensors[id(result)] = weakref.ref(result), number
        elif isinstance(result, torch.Tensor):
            self._number_of(result)
        elif isinstance(result, tuple | list):
            for each in result:
                self.made(each)
        return result

    def add_content(self, content: bytes | int | None) -> None:
        """Adds what a tensor is made of."""
        self._calls.append(content)

    def written_outside(self, known: Iterable[torch.Tensor]) -> bool:
        """Whether the run has written in place to a tensor that was there before it, besides those that are known, or may have, past torch."""
        others = set(map(id, known))
        met = [(tensor, version) for each, version in self._outside if (tensor := each()) is not None]
        # Of one that was made in inference mode, nobody counts writes.
        if any(version == _UNCOUNTED for _, version in met):
            return True
        # What is written past a version is in no snapshot where the tensor is large.
        if any(data._version > 0 and each() is not None for each, data in self._data_of_outside):
            return True
        if any(map(self.lent.is_handed_out, (tensor for tensor, _ in met))):
            return True
        return any(tensor._version != version and id(tensor) not in others for tensor, version in met)

    def has_made(self, tensor: torch.Tensor) -> bool:
        """Whether a call has returned a tensor that the code did not have from before."""
        known = self._tensors.get(id(tensor))
        is_met = known is not None and known[0]() is tensor
        return is_met and all(each() is not tensor for each, _ in self._outside)

    def number(self) -> int:
        """The same for the same calls."""
        return hash(tuple(self._calls))

    def _number_of(self, tensor: torch.Tensor) -> int:
        """A number below zero, as the trail has none of a call itself."""
        known = self._tensors.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known[1]
        self._last_number -= 1
        reference = weakref.ref(tensor)
        self._tensors[id(tensor)] = reference, self._last_number
        self._outside.append((reference, _UNCOUNTED if tensor.is_inference() else tensor._version))
        # Of what the code has from before: what it makes is looked at where its memory is handed out.
        if not tensor.requires_grad and is_lent(tensor):
            self.lent.is_any = True
        return self._last_number

    def _add(self, values: Sequence[Any]) -> None:
        found, tensors = self._calls, self._tensors
        for value in values:
            kind = type(value)
            if kind in _TENSORS:
                # Its place counts: `x[rows, 0]` is not `x[0, rows]`, nor is `x[..., 0]` what `x[0, ...]` is.
                known = tensors.get(id(value))
                found.append(known[1] if known is not None and known[0]() is value else self._number_of(value))
                if self.lent.is_any and not value.requires_grad and (content := self._news(value)) is not None:
                    found.append(content)
            elif kind in _TOLD:
                if kind is int and value < 0:
                    # Python has one hash for -1 and -2, which are other dimensions.
                    found += ("below zero", -value)
                else:
                    found.append(value)
            elif kind in _NESTED:
                found.append(len(value))
                self._add(value)
            elif kind is float:
                # As text: 1.0 has the hash of 1, and a number that is none that of its address.
                found.append(value.hex())
            else:
                self._add_rarer(value)

    def _news(self, tensor: torch.Tensor) -> bytes | int | None:
        return self.lent.news(tensor) if tensor.layout is torch.strided and tensor.device.type == "cpu" else None

    def _add_rarer(self, value: Any) -> None:
        found = self._calls
        if isinstance(value, torch.Tensor):
            found.append(self._number_of(value))
        elif isinstance(value, int):
            # One of the program's own, or of `enum`.
            self._add((int(value),))
        elif isinstance(value, str):
            found.append(value)
        elif isinstance(value, tuple | list):
            # Sizes, and tuples with names.
            found.append(len(value))
            self._add(value)
        elif isinstance(value, slice):
            self._add((value.start, value.stop, value.step))
        elif isinstance(value, np.generic) and not value.dtype.hasobject:
            found += (value.dtype.char, value.tobytes())
        elif isinstance(value, float):
            found.append(float(value).hex())
        elif isinstance(value, complex):
            found += (value.real.hex(), value.imag.hex())
        elif isinstance(value, np.ndarray) and value.nbytes <= _LARGEST_TOLD_BYTES and not value.dtype.hasobject:
            found += (value.dtype.char, value.shape, value.tobytes())
        else:
            found.append(type(value))


def _is_ours(frame: types.FrameType | None) -> bool:
    """Whether our own code has called torch in `frame`; protocols of ours that pass a call of the program's on are asked who has called them."""
    while frame is not None and frame.f_code in HANDLERS:
        frame = frame.f_back
    while frame is not None and frame.f_code.co_filename in _PASS_ON:
        frame = frame.f_back
    if frame is None:
        return False
    file = frame.f_code.co_filename
    is_ours = file.startswith(FILES_OF_OURS)
    _IS_CODE_OF_OTHERS[file] = not is_ours
    return is_ours


@final
class Operators(TorchDispatchMode):
    """Adds the operators to a trail: also those of scripted functions, and those that are called where protocols are switched off."""

    def __init__(self, calls: CallTrail) -> None:
        super().__init__()
        self._calls = calls

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Under any other mode torch does not compile."""
        return True

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with Unwatched():
            self._calls.note(func, args, kwargs)
            if func is _MAKES_TENSOR:
                # `torch.from_numpy` is no function that protocols see.
                if args[0].nbytes <= _LARGEST_NUMBERS_BYTES:
                    self._calls.add_content(content_of(args[0]))
                self._calls.lent.know(args[0])
        made = func(*args, **kwargs) if kwargs else func(*args)
        with Unwatched():
            return self._calls.made(made)


def operators_at(device: torch.device, calls: CallTrail) -> contextlib.AbstractContextManager[Any]:
    """Has operators added to `calls`, at the host."""
    return Operators(calls) if device.type == "cpu" else contextlib.nullcontext()


@final
class Trail(TorchFunctionMode):
    """Notes the calls that are made while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = CallTrail()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in SAYS_WHAT_IT_IS_LIKE:
            return func(*args, **kwargs) if kwargs else func(*args)
        self.calls.note(func, args, kwargs)
        func = dispatched(func)
        return self.calls.made(func(*args, **kwargs) if kwargs else func(*args))


HANDLERS: set[types.CodeType] = {Trail.__torch_function__.__code__}
"""The code of those protocols of ours that pass the program's calls on: who called them has made the call."""
