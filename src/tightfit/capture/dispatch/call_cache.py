"""Outputs of operators whose calls are like earlier ones: the same operator on tensors of the same shapes, strides and dtypes.

torch's fake tensors have such a cache too, but its keys and its tensors took most of the time of a trace. This one is narrower: dense tensors of one
mode, no symbolic sizes, no outputs whose size depends on data. What it does not cover goes to torch as before.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tightfit.capture.dispatch.operators import OperatorFacts, tensors
from tightfit.capture.dispatch.values.known_values import is_small

Key = tuple[Any, ...]

_META = torch.device("meta")
_PLAIN = frozenset((bool, str, type(None), torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format))
_NUMBERS = frozenset((int, float, complex))
# With such indices a selection is as large as their number of true values.
_MASKS = (torch.bool, torch.uint8, torch.int8)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What the tape says of a call: its row of operators, and the sizes of its product, if it is one."""

    dtype: torch.dtype | None
    flops: int
    bytes_read: int
    bytes_written: int
    sizes: tuple[Any, ...] | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Output:
    """One tensor among the outputs: the argument with that number itself, a view of it, or one with memory of its own (-1)."""

    argument: int
    is_view: bool
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    is_inference: bool


@dataclasses.dataclass(slots=True, kw_only=True)
class Call:
    """A call that was seen. `collect` makes its result of the list of its outputs; `row` is None until it was recorded once.

    `scratch` has the requests of its kernel by the settings of torch that they depend on; `has_small_outputs`: their values may be known.
    """

    outputs: tuple[_Output | int | None, ...]
    collect: Callable[[list[Any]], Any]
    has_small_outputs: bool
    is_inference: bool
    row: Row | None = None
    scratch: dict[Any, tuple[int, ...]] = dataclasses.field(default_factory=dict)


class CallCache:
    """The calls that were seen, and fake tensors of `mode` made without asking torch."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._calls: dict[Key, Call | None] = {}
        self._attributes: dict[torch.device, dict[str, Any]] = {}

    def key(
        self,
        func: OpOverload,
        known: OperatorFacts,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        is_adjusted: bool,
    ) -> Key | None:
        """All that the outputs of a call, and its row on the tape, follow from; None for a call that is not remembered.

        `is_adjusted`: whether the virtual GPU corrects the outputs, by rules of its own on the same arguments.
        """
        if not known.has_known_shape:
            return None
        key: list[Any] = [id(func), is_adjusted, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        if not self._describe(args, known, key):
            return None
        if kwargs:
            key += kwargs
            if not self._describe(kwargs.values(), known, key):
                return None
        return tuple(key)

    def _describe(self, values: Iterable[Any], known: OperatorFacts, key: list[Any]) -> bool:
        """Adds what shapes depend on to `key`; False if that is not all known."""
        mode = self._mode
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if (
                    value.fake_mode is not mode
                    or value.constant is not None
                    or value.layout is not torch.strided
                    or value.is_conj()
                    or value.is_neg()
                ):
                    return False
                key += (value.shape, value.stride(), value.dtype, value.fake_device, value.is_inference())
                if not known.is_elementwise:
                    key.append(value.storage_offset())
            elif kind in _NUMBERS:
                key += (kind, None if known.is_elementwise else value)
            elif kind in _PLAIN:
                key += (kind, value)
            elif kind is list or kind is tuple:
                key.append(len(value))
                if not self._describe(value, known, key):
                    return False
            elif kind is torch.Tensor and value.layout is torch.strided:
                key += (value.shape, value.stride(), value.dtype, None)
            else:
                return False
        return True

    def find(self, key: Key) -> Call | None:
        """The call with that key, if there was one."""
        return self._calls.get(key)

    def remember(self, key: Key, known: OperatorFacts, args: Sequence[Any], out: Any) -> Call | None:
        """Keeps what torch has returned for a call; None, and so it stays, for one whose outputs do not follow from shapes."""
        if key in self._calls:
            return None
        call = self._calls[key] = _call(known, args, out)
        if call is not None and not _are_the_same(self.outputs(call, args), out):
            call = self._calls[key] = None
        return call

    def outputs(self, call: Call, args: Sequence[Any]) -> Any:
        """What the operator returns for these arguments."""
        with torch._C._DisableTorchDispatch():
            if call.is_inference == torch.is_inference_mode_enabled():
                return call.collect([self._made(output, args) for output in call.outputs])
            # A view is what it is a view of: one of an ordinary tensor is an ordinary one under inference mode too.
            with torch.inference_mode(call.is_inference):
                return call.collect([self._made(output, args) for output in call.outputs])

    def _made(self, output: _Output | int | None, args: Sequence[Any]) -> Any:
        if not isinstance(output, _Output):
            return output
        if output.argument < 0:
            empty = torch.empty_strided(output.size, output.stride, dtype=output.dtype, device=_META)
            return self._wrapped(empty, output.device)
        return self._view(args[output.argument], output) if output.is_view else args[output.argument]

    def new(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device) -> FakeTensor:
        """A tensor with memory of its own."""
        # The virtual GPU is asked for one outside of an operator too, where it would see this one as the program's.
        with torch._C._DisableTorchDispatch():
            return self._wrapped(torch.empty_strided(size, stride, dtype=dtype, device=_META), device)

    def _view(self, source: FakeTensor, output: _Output) -> FakeTensor:
        view = torch.empty_strided((0,), (1,), dtype=output.dtype, device=_META)
        view.set_(source.untyped_storage(), output.offset, output.size, output.stride)
        return self._wrapped(view, output.device)

    def _wrapped(self, meta: torch.Tensor, device: torch.device) -> FakeTensor:
        """As `FakeTensor.__new__` (torch/_subclasses/fake_tensor.py), whose attributes are taken over from a tensor that it has made."""
        attributes = self._attributes.get(device)
        if attributes is None:
            attributes = self._attributes[device] = dict(FakeTensor(self._mode, meta, device).__dict__)
        made: FakeTensor = torch.Tensor._make_subclass(
            FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device
        )
        torch._C._set_throw_on_mutable_data_ptr(made)
        made.__dict__.update(attributes)
        return made


def _call(known: OperatorFacts, args: Sequence[Any], out: Any) -> Call | None:
    if out is None:
        return Call(
            outputs=(), collect=_nothing, has_small_outputs=True, is_inference=torch.is_inference_mode_enabled()
        )
    is_one = isinstance(out, torch.Tensor)
    if not is_one and not isinstance(out, list | tuple):
        return None
    if any(
        isinstance(index, torch.Tensor) and index.dtype in _MASKS
        for indices in args
        if isinstance(indices, list | tuple)
        for index in indices
    ):
        return None
    outputs = []
    for value in [out] if is_one else out:
        output = value if value is None or type(value) is int else _output(known, args, value)
        if isinstance(output, _Unknown):
            return None
        outputs.append(output)
    made = {o.is_inference for o in outputs if isinstance(o, _Output) and (o.is_view or o.argument < 0)}
    if len(made) > 1:
        return None
    return Call(
        outputs=tuple(outputs),
        is_inference=made.pop() if made else torch.is_inference_mode_enabled(),
        collect=_only if is_one else list if isinstance(out, list) else tuple,
        has_small_outputs=all(is_small(tensor) for tensor in tensors((out,))),
    )


def _nothing(_made: list[Any]) -> None:
    return None


def _only(made: list[Any]) -> Any:
    return made[0]


class _Unknown:
    """An output that does not follow from the arguments."""


_UNKNOWN = _Unknown()


def _output(known: OperatorFacts, args: Sequence[Any], value: Any) -> _Output | _Unknown:
    """How a tensor follows from the arguments."""
    if type(value) is not FakeTensor or value.layout is not torch.strided or value.constant is not None:
        return _UNKNOWN
    if value.requires_grad or value.is_conj() or value.is_neg():
        return _UNKNOWN
    place = {"size": tuple(value.shape), "stride": value.stride(), "offset": int(value.storage_offset())}
    described = {**place, "dtype": value.dtype, "device": value.fake_device, "is_inference": value.is_inference()}
    for number, arg in enumerate(args):
        if arg is value:
            return _Output(argument=number, is_view=False, **described)
    memory = value.untyped_storage()._cdata
    if not known.is_view:
        is_own = not any(memory == tensor.untyped_storage()._cdata for tensor in _dense(args))
        return _Output(argument=-1, is_view=False, **described) if is_own and not place["offset"] else _UNKNOWN
    sources = [number for number, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
    if len(sources) != 1 or type(args[sources[0]]) is not FakeTensor:
        return _UNKNOWN
    is_view = memory == args[sources[0]].untyped_storage()._cdata
    return _Output(argument=sources[0], is_view=True, **described) if is_view else _UNKNOWN


def _dense(args: Sequence[Any]) -> Iterable[torch.Tensor]:
    for arg in args:
        for value in arg if isinstance(arg, list | tuple) else (arg,):
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                yield value


def _are_the_same(made: Any, true: Any) -> bool:
    """Whether the tensors that were made are as those of torch."""
    if made is None or isinstance(made, torch.Tensor):
        made, true = [made], [true]
    return all(
        one is other
        or (
            one.shape == other.shape
            and one.stride() == other.stride()
            and one.storage_offset() == other.storage_offset()
            and one.dtype == other.dtype
            and one.is_inference() == other.is_inference()
            and one.untyped_storage().nbytes() == other.untyped_storage().nbytes()
        )
        for one, other in zip(made, true, strict=True)
    )
