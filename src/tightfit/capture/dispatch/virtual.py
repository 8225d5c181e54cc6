"""The virtual GPU: a dispatch mode under which `cuda` tensors have shapes, strides and lifetimes, and no data.

Only what touches a `cuda` tensor or asks for one is virtual; everything on the host runs for real. An operator's outputs come from torch's
own fake tensors, on the device type `cuda` itself, so that C++ composites, autograd and autocast take the paths they take on a card. Every
new storage is recorded, and recorded as freed when Python and autograd have dropped their last reference.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tightfit.capture.dispatch import fallback, one_card, program_operators, sparse
from tightfit.capture.dispatch.data_reads import ReadPolicy
from tightfit.capture.dispatch.hosts import HostMemory
from tightfit.capture.dispatch.known_values import Shadows, Unknown, limit
from tightfit.capture.dispatch.operators import OperatorFacts, are_alike, facts, tensors, written
from tightfit.capture.dispatch.unknown_conditions import Truths
from tightfit.capture.observe.attribution import Attribution
from tightfit.capture.observe.kernel_memory import KernelMemory
from tightfit.capture.observe.recorder import Recorder
from tightfit.errors import CaptureError, faults
from tightfit.tape import Category

aten = torch.ops.aten

CUDA = torch.device("cuda", 0)

_DEVICE_OF = torch.ops.prim.device.default
_OPERATORS_BETWEEN_PROGRESS = 1024

_ASSUMED_OF_FAKES = "its outputs are those of its fake implementation; memory that it allocates besides is not seen, and its time is that of one pass over its arguments"

Handler = Callable[["VirtualGpu", OpOverload, Sequence[Any], Mapping[str, Any]], Any]


def _names_the_card(args: Sequence[Any]) -> bool:
    """Whether a device among the positional arguments is the card: `aten.to.device` has it there."""
    return any(isinstance(a, torch.device) and a.type == "cuda" for a in args)


# A storage and not a tensor is what the caching allocator knows: views and detached aliases share one, and its
# end is the moment the block is freed.
class StorageReference(weakref.ref[torch.UntypedStorage]):
    """A weak reference to a storage that knows the storage's index on the tape."""

    __slots__ = ("address", "index")

    address: int
    index: int


class VirtualGpu(TorchDispatchMode):
    """The mode. `handlers` replace single operators, `kernels` adds the scratch memory of CUDA kernels.

    `composites` are the replacements of torch's composite operators on a card. They are registered with torch too, but under inference mode
    composites reach a dispatch mode undecomposed.
    """

    def __init__(
        self,
        recorder: Recorder,
        handlers: Mapping[OpOverload, Handler],
        kernels: KernelMemory,
        composites: Mapping[OpOverload, Callable[..., Any]],
    ) -> None:
        super().__init__()
        self.recorder = recorder
        self.attribution = Attribution(recorder)
        self.reads = ReadPolicy(self.attribution.where, recorder.assume)
        self.shadows = Shadows()
        self.host = HostMemory(recorder)
        # Without fallback kernels: torch would run an operator without a shape rule for real
        # (`run_fallback_kernel`), whatever its size and without a word. `fallback` does that within bounds.
        self.fake = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        self.references: dict[int, StorageReference] = {}
        self.truths = Truths()
        self.has_side_streams = False
        self.progress: Callable[[str, int], None] | None = None
        self.on_write: Callable[[Iterable[torch.Tensor]], None] | None = None  # called with each operator's targets
        self._handlers = dict(handlers)
        self._kernels = kernels
        self._composites = composites
        self._names: dict[OpOverload, int] = {}
        self._dtypes: dict[torch.dtype, int] = {}

    def handle(self, func: OpOverload, handler: Handler) -> None:
        """Has `handler` run an operator that the program has defined."""
        self._handlers[func] = handler

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # Asked for each `tensor.device`, so it is answered without a dispatch. Together with keeping torch's
        # compiler out (patches/eager.py) this took a trace of GPT-2 from 5.3 to 3.3 s (docs/log.md, "Start-up
        # time").
        if func is _DEVICE_OF:
            return args[0].fake_device
        try:
            return self._dispatch(func, types, args, kwargs or {})
        except Exception as error:
            faults.note(error, "the capture")
            raise

    def _dispatch(self, func: OpOverload, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        # Tensors of libraries that wrap others take an operator apart themselves, into operators that come here again.
        if any(kind.__module__.partition(".")[0] not in ("torch", "tightfit") for kind in types):
            return NotImplemented
        device = kwargs.get("device")
        if device is not None:
            one_card.check(device)
        if FakeTensor not in types and (device is None or torch.device(device).type != "cuda"):
            if torch.is_inference_mode_enabled() and facts(func).is_composite and _names_the_card(args):
                return self._take_apart(func, args, kwargs)
            return self.host.run(func, args, kwargs)
        if torch.is_inference_mode_enabled() and (func in self._composites or facts(func).is_composite):
            return self._take_apart(func, args, kwargs)
        handler = self._handlers.get(func)
        return handler(self, func, args, kwargs) if handler else self.run(func, args, kwargs)

    @faults.hands_over
    def _take_apart(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        replaced = self._composites.get(func)
        with self:
            return replaced(*args, **kwargs) if replaced else func.decompose(*args, **kwargs)

    def run(
        self,
        func: OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        adjust: Callable[[Any], Any] | None = None,
    ) -> Any:
        """Runs one operator on virtual tensors and records it; `adjust` corrects the outputs before they are recorded."""
        known = facts(func)
        is_own = program_operators.is_own(func)
        composed = program_operators.composed(func) if is_own else None
        if composed is not None:
            return program_operators.run_body(self, composed, args, kwargs)
        if "generator" in kwargs:
            # The virtual card's generators are host generators (patches/torch_api.py), which fake kernels
            # refuse for `cuda` tensors.
            kwargs = {**kwargs, "generator": None}
        lifted = [self.lift(a) if isinstance(a, torch.Tensor) and not isinstance(a, FakeTensor) else a for a in args]
        try:
            # Lists as long as a model has parameters, which torch's fake tensors would go through for nothing.
            out = None
            if not (known.updates_lists and are_alike(lifted)):
                out = self.fake.dispatch(func, (FakeTensor,), lifted, kwargs)
        except (*fallback.UNSUPPORTED, RuntimeError) as error:
            if not isinstance(error, fallback.UNSUPPORTED) and not program_operators.lacks_fake(error):
                raise
            has_run, out = program_operators.try_body(self, func, args, kwargs) if is_own else (False, None)
            if has_run:
                return out
            out = fallback.run(self, func, args, kwargs)
        else:
            if is_own:
                self.recorder.assume(self.attribution.where(), f"{known.name}: {_ASSUMED_OF_FAKES}")
        if known.is_view:
            return out
        if adjust is not None:
            out = adjust(out)
        try:
            self._record(func, known, args, kwargs, out)
        except CaptureError:
            raise
        except Exception as error:
            # Nothing of the program's runs here.
            raise faults.internal_error(error, f"the capture of {known.name}") from error
        return out

    def _record(
        self, func: OpOverload, known: OperatorFacts, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
    ) -> None:
        outputs = (
            [out] if isinstance(out, torch.Tensor) else list(tensors(out)) if isinstance(out, list | tuple) else []
        )
        self.note_operator(func, known, args, kwargs, outputs, out)
        if known.creates:
            for tensor in outputs:
                self.born(tensor)
        if known.resizes:
            for tensor in written(func, args, kwargs):
                self._resized(tensor)
        if isinstance(out, torch.Tensor) and out.dtype == torch.bool:
            self.truths.follow(func, args, out)
        # After the outputs: most kernels ask for their scratch memory then (docs/how-it-works/cuda-rules.md).
        self._kernels.add(func, args, kwargs, out)
        self._follow_values(func, known, args, kwargs, outputs)

    def note_operator(
        self,
        func: OpOverload,
        known: OperatorFacts,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        outputs: Sequence[torch.Tensor],
        out: Any,
    ) -> None:
        """Adds a row to the tape's operators."""
        bytes_read = bytes_written = 0
        dtype = None
        for tensor in tensors(args):
            bytes_read += sparse.num_bytes(tensor)
            if dtype is None and tensor.is_floating_point():
                dtype = tensor.dtype
        for tensor in outputs or written(func, args, kwargs):
            bytes_written += sparse.num_bytes(tensor)
            dtype = dtype or tensor.dtype
        flops = known.flops(*args, **kwargs, out_val=out) if known.flops else 0
        name = self._names.get(func)
        if name is None:
            name = self._names[func] = self.recorder.intern(known.name)
        module, line = self.attribution.locate()
        recorder = self.recorder
        recorder.operator(name, module, line, self._dtype(dtype), flops, bytes_read, bytes_written)
        if self.on_write is not None and known.is_mutable:
            self.on_write(written(func, args, kwargs))
        if self.progress is not None and not recorder.num_operators % _OPERATORS_BETWEEN_PROGRESS:
            self.progress(recorder.spans[-1][0], recorder.num_operators)

    def _dtype(self, dtype: torch.dtype | None) -> int:
        if dtype is None:
            return 0
        index = self._dtypes.get(dtype)
        if index is None:
            index = self._dtypes[dtype] = self.recorder.intern(str(dtype).removeprefix("torch."))
        return index

    def born(self, tensor: torch.Tensor, category: Category = Category.TEMPORARIES) -> None:
        """Records the storage of `tensor` as allocated, if it is a new one on the device."""
        if tensor.layout != torch.strided:
            for part in sparse.parts(tensor):
                self.born(part, category)
            return
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self.references or tensor.device.type != "cuda":
            return
        num_bytes = storage.nbytes()
        # The caching allocator hands out no block for 0 bytes (CUDACachingAllocator.cpp, `allocate`).
        if num_bytes:
            reference = StorageReference(storage, self._died)
            reference.address, reference.index = address, self.recorder.allocate(num_bytes, category)
            self.references[address] = reference

    def _died(self, reference: StorageReference) -> None:
        # All that is known by the address goes with it: another storage may be made there at once.
        del self.references[reference.address]
        self.shadows.forget(reference.address)
        self.truths.forget(reference.address)
        self.recorder.free(reference.index)

    def _resized(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        reference = self.references.get(storage._cdata)
        if reference is None:
            self.born(tensor)
        # Storages only grow: `resize_` to fewer elements keeps the block (aten/src/ATen/native/cuda/Resize.h,
        # `maybe_resize_storage_cuda`).
        elif self.recorder.storages["num_bytes"][reference.index] < storage.nbytes():
            self._died(reference)
            self.born(tensor)

    def index_of(self, tensor: torch.Tensor) -> int | None:
        """The tape's index of the storage of `tensor`, if it is on the device."""
        if not isinstance(tensor, FakeTensor) or tensor.layout != torch.strided:
            return None
        reference = self.references.get(tensor.untyped_storage()._cdata)
        return reference.index if reference else None

    def lift(self, host: torch.Tensor) -> FakeTensor:
        """A fake host tensor of the same shape: FakeTensorMode would memoise the real one and keep it alive."""
        kwargs = {"dtype": host.dtype, "device": host.device}
        return self._empty(host.size(), host.stride(), kwargs)

    def new(
        self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, category: Category = Category.TEMPORARIES
    ) -> FakeTensor:
        """A new tensor on the device; it belongs to the operator that was noted last."""
        out = self.empty(size, stride, dtype)
        self.born(out, category)
        return out

    def empty(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> FakeTensor:
        """A tensor on the device that is not recorded yet."""
        return self._empty(size, stride, {"dtype": dtype, "device": CUDA})

    def _empty(self, size: Sequence[int], stride: Sequence[int], kwargs: Mapping[str, Any]) -> FakeTensor:
        out = self.fake.dispatch(aten.empty_strided.default, (), (size, stride), kwargs)
        assert isinstance(out, FakeTensor)
        return out

    def _follow_values(
        self,
        func: OpOverload,
        known: OperatorFacts,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        outputs: Sequence[torch.Tensor],
    ) -> None:
        first = next(tensors(args), None)
        targets = list(written(func, args, kwargs)) if known.is_mutable else []
        small = all(t.numel() * t.element_size() <= limit(t.dtype) and t.layout == torch.strided for t in outputs)
        # A factory has no tensor among its arguments; its values are known by its arguments alone (`arange`,
        # `zeros`).
        if small and (first is None or not isinstance(first, FakeTensor) or self.shadows.known(first)):
            try:
                values = self.shadows.run(func, args, kwargs)
            except Unknown:
                pass
            else:
                if not targets:
                    for tensor, value in zip(
                        outputs, tensors(values if isinstance(values, list | tuple) else (values,)), strict=True
                    ):
                        self.shadows.adopt(tensor, value)
                return
        self._forget(targets)

    def _forget(self, targets: Iterable[torch.Tensor]) -> None:
        # What was written with unknown values is unknown from now on, also through every view of it.
        for tensor in targets:
            if isinstance(tensor, FakeTensor) and tensor.layout == torch.strided:
                self.shadows.forget(tensor.untyped_storage()._cdata)

    def note_writes(self, targets: Sequence[torch.Tensor]) -> None:
        """Notes that a kernel has written unknown values to `targets`."""
        if self.on_write is not None:
            self.on_write(targets)
        self._forget(targets)
