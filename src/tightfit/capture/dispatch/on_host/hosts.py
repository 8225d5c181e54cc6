"""Host tensors are real, but weights made on the host are never filled.

`torch.empty` of a megabyte or more only reserves addresses: pages that nobody writes cost nothing. Such a storage is *blank* until real
data is written to it. Initialisers of a blank storage are skipped, casts and copies of one give another blank one, and so an 8B model that
a script builds on the host before `.to("cuda")` takes no host memory. Data loading, tokenising and shape arithmetic see real tensors.
"""

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from tightfit.capture.dispatch.on_host.deferred_fills import DeferredFills
from tightfit.capture.dispatch.on_host.unknown_masks import UnknownMasks
from tightfit.capture.dispatch.operators import facts, tensors
from tightfit.capture.observe.attribution import user_line
from tightfit.capture.observe.host_storages import HostStorages
from tightfit.capture.observe.recorder import Recorder
from tightfit.capture.observe.reserved_memory import reserved
from tightfit.errors import faults
from tightfit.tape import WaitKind
from tightfit.units import KIB

aten = torch.ops.aten

_Reference = weakref.ref[torch.UntypedStorage]

# Below this, tensors are data: masks, labels, small tables. Weights that matter for memory are larger.
MIN_BLANK_BYTES = 1 << 20
# malloc maps large blocks too, but charges them against the system's commit limit: an 8B model would not fit a
# small machine.
MIN_MAPPED_BYTES = 1 << 28

_FACTORIES = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
_ZEROS = {aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default}
_DRAWS = {
    aten.randn.default: aten.normal_.default,
    aten.rand.default: aten.uniform_.default,
    aten.normal.float_float: aten.normal_.default,
}
_RANDOM_FACTORIES = frozenset(_DRAWS)
# Drawing the numbers is what takes the time of a large `torch.randn`; where a script makes weights that way,
# nothing ever reads them.
_LARGE_RANDOM_BYTES = 1 << 26
# What only the shape of a tensor is asked for.
_OF_SHAPES = {
    *_FACTORIES,
    *_ZEROS,
    aten.ones_like.default,
    aten.full_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
}
# In-place arithmetic is part of initialisers: draws are scaled, shifted and clamped. Any other in-place
# operator on a blank tensor makes it real.
_FILLS = {
    getattr(getattr(aten, name), overload)
    for name, overloads in {
        "normal_": ("default",),
        "uniform_": ("default",),
        "random_": ("default", "from", "to"),
        "bernoulli_": ("float",),
        "exponential_": ("default",),
        "zero_": ("default",),
        "fill_": ("Scalar", "Tensor"),
        "erfinv_": ("default",),
        "clamp_": ("default",),
        "mul_": ("Scalar", "Tensor"),
        "add_": ("Scalar", "Tensor"),
        "sub_": ("Scalar", "Tensor"),
        "div_": ("Scalar", "Tensor"),
    }.items()
    for overload in overloads
}
# Casts, copies, and the arithmetic of hand-written initialisation (`torch.empty(...) * scale`).
_ARITHMETIC = {
    aten.mul.Tensor: aten.mul_.Tensor,
    aten.div.Tensor: aten.div_.Tensor,
    aten.add.Tensor: aten.add_.Tensor,
    aten.sub.Tensor: aten.sub_.Tensor,
    aten.mul.Scalar: aten.mul_.Scalar,
}
_COPIES = {aten._to_copy.default, aten.clone.default, *_ARITHMETIC}


# An optimizer that runs on the host is the one work there that is priced: it takes as long as the memory of the host lets it.
_UPDATES = {
    getattr(aten, name).default: num_passes
    # How often each list is read or written: parameters, gradients, states (aten/src/ATen/native/cpu/FusedAdamKernel.cpp and beside it).
    for name, num_passes in {
        "_fused_adam_": (2, 1, 2, 2, 2),
        "_fused_adamw_": (2, 1, 2, 2, 2),
        "_fused_sgd_": (2, 1, 2),
        "_fused_adagrad_": (2, 1, 2),
    }.items()
}


class HostMemory:
    """Runs operators on host tensors, except on blank ones, whose data does not matter."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._blank: dict[int, _Reference] = {}
        self.storages = HostStorages(recorder.host)
        self.unknown_masks = UnknownMasks()
        self.fills = DeferredFills()

    def is_blank(self, tensor: torch.Tensor) -> bool:
        """Whether no real data has been written to the storage of `tensor`."""
        # A class with an answer of its own (a lazy gradient) would compute its elements to give it, and within an operator.
        has_memory = tensor.layout == torch.strided and type(tensor).untyped_storage is torch.Tensor.untyped_storage
        return has_memory and tensor.untyped_storage()._cdata in self._blank

    @faults.hands_over
    def run(self, operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The result of `operator` on host tensors."""
        if kwargs.get("pin_memory"):
            return self.storages.pinned(self.run(operator, args, {**kwargs, "pin_memory": False}))
        if operator is aten.is_pinned.default:
            # Code of torch in C++ asks; Python's method is answered before it comes here (patches/torch_api.py).
            return self.storages.is_pinned(args[0])
        if operator in _UPDATES and self._note_update(operator, args):
            return None
        if self.unknown_masks:
            args, kwargs = self.unknown_masks.selecting(operator, args, kwargs)
            result = self._run(operator, args, kwargs)
            self.unknown_masks.follow(operator, args, result)
            return result
        return self._run(operator, args, kwargs)

    def _run(self, operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if first is not None and self._blank and self.is_blank(first):
            blank = self._of_blank(operator, first, args, kwargs)
            if blank is not None:
                return blank
        elif operator in _RANDOM_FACTORIES and _factory_bytes(operator, args, kwargs) >= _LARGE_RANDOM_BYTES:
            size = {k: v for k, v in kwargs.items() if k != "generator"}
            drawn = self._run(aten.empty.memory_format, args[-1:], size)
            self.fills.add(_DRAWS[operator], drawn, args[:-1], {})
            return drawn
        if self._blank and not facts(operator).is_view and operator not in _OF_SHAPES:
            for read in filter(self.is_blank, tensors(args)):
                self._write(read)
        result = _mapped(operator, args, kwargs) if operator in _FACTORIES or operator in _ZEROS else None
        if result is None:
            result = operator(*args, **kwargs)
        if isinstance(result, torch.Tensor) and result.numel() * result.element_size() >= MIN_BLANK_BYTES:
            self.storages.hold(result)
            if operator in _FACTORIES:
                self._set_blank(result)
        return result

    def _of_blank(
        self, operator: OpOverload, first: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> torch.Tensor | None:
        """The result of an operator on a blank tensor whose data it does not need; None for others."""
        if operator in _FILLS:
            self.fills.add(operator, first, args[1:], kwargs)
            return first
        if operator is aten.copy_.default and self.is_blank(args[1]):
            return first
        # Whole numbers may become others by arithmetic.
        is_copy = operator in _COPIES and (first.is_floating_point() or operator not in _ARITHMETIC)
        has_shape = not any(isinstance(a, torch.Tensor) and a.shape not in ((), first.shape) for a in args[1:])
        if is_copy and has_shape and self.fills.can_copy(first):
            copy = self._blank_copy(first, kwargs)
            if operator in _ARITHMETIC:
                self.fills.add(_ARITHMETIC[operator], copy, args[1:], kwargs)
            return copy
        if operator._schema.is_mutable:
            self._write(first)
            self._blank.pop(first.untyped_storage()._cdata, None)
        return None

    def _write(self, tensor: torch.Tensor) -> None:
        """A blank tensor is read, or written to in part: what was to be in it is, where there is room."""
        if not self.fills.has(tensor):
            return
        if self.fills.write(tensor):
            self._blank.pop(tensor.untyped_storage()._cdata, None)
        else:
            self._recorder.assume(
                user_line(),
                "random numbers and other fills of large tensors on the host are read, and assumed to be zeros",
            )

    def _note_update(self, operator: OpOverload, args: Sequence[Any]) -> bool:
        """Notes an optimizer's fused update of host tensors; returns whether it is to be left out, since it is one of blank ones."""
        updated = list(zip(_UPDATES[operator], args, strict=False))
        num_bytes = sum(passes * tensor.nbytes for passes, tensors in updated for tensor in tensors)
        self._recorder.waits.add(WaitKind.HOST_UPDATES, event=num_bytes // KIB)
        return any(self.is_blank(tensor) for _, tensors in updated for tensor in tensors)

    def new_blank(self, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An unwritten host tensor; blank if it is large."""
        tensor = self.run(aten.zeros.default, (list(size),), {"dtype": dtype})
        if tensor.numel() * tensor.element_size() >= MIN_BLANK_BYTES:
            self.storages.hold(tensor)
            self._set_blank(tensor)
        return tensor

    def _set_blank(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        self._blank[address] = weakref.ref(storage, _taking(self._blank, address))
        self.fills.begin(tensor)

    def _blank_copy(self, source: torch.Tensor, kwargs: Mapping[str, Any]) -> torch.Tensor:
        how = {
            "dtype": kwargs.get("dtype") or source.dtype,
            "memory_format": kwargs.get("memory_format") or torch.preserve_format,
        }
        copy = self.run(aten.empty_like.default, (source,), how)
        self.storages.hold(copy)
        self._set_blank(copy)
        self.fills.copy(source, copy)
        return copy


def _taking(table: dict[int, _Reference], address: int) -> Callable[[_Reference], object]:
    """A callback that removes a dead reference from `table`. It runs no Python code, in which an interrupt could be lost."""
    return functools.partial(table.pop, address)


def _mapped(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """A large host tensor of zeros that reserves addresses only."""
    first = args[0]
    device = kwargs.get("device") or (first.device if isinstance(first, torch.Tensor) else "cpu")
    if torch.device(device).type != "cpu":
        # One on the meta device has no memory anyway.
        return None
    if isinstance(first, torch.Tensor):
        if first.layout != torch.strided or first.numel() * first.element_size() < MIN_BLANK_BYTES:
            return None
        # The operator itself runs on the meta device first, to learn shape, strides and dtype from torch and
        # not from a copy of its rules.
        args = (torch.empty_strided(first.size(), first.stride(), dtype=first.dtype, device="meta"), *args[1:])
    shape = operator(*args, **{**kwargs, "device": "meta", "pin_memory": False})
    num_bytes = shape.untyped_storage().nbytes()
    # Zeros are written where they are made, as an optimizer's states at the host are: mapped ones take memory once something else is.
    if num_bytes < (MIN_BLANK_BYTES if operator in _ZEROS else MIN_MAPPED_BYTES) or shape.layout != torch.strided:
        return None
    return mapped_zeros(num_bytes, shape)


def mapped_zeros(num_bytes: int, shape: torch.Tensor) -> torch.Tensor:
    """Zeros of the shape, strides and dtype of `shape`, whose storage has `num_bytes`: memory is taken for the pages that are written, and for no other."""
    whole = torch.frombuffer(reserved(num_bytes), dtype=torch.uint8)
    return whole.view(shape.dtype).as_strided(shape.size(), shape.stride())


def _factory_bytes(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    size = args[2] if operator is aten.normal.float_float else args[0]
    return torch.Size(size).numel() * dtype.itemsize
