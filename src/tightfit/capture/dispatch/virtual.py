"""The virtual GPU: a dispatch mode under which `cuda` tensors have shapes, strides and lifetimes, and no data.

Only what touches a `cuda` tensor or asks for one is virtual; everything on the host runs for real. An operator's outputs come from torch's
own fake tensors, on the device type `cuda` itself, so that C++ composites, autograd and autocast take the paths they take on a card. Every
new storage is recorded, and recorded as freed when Python and autograd have dropped their last reference.
"""

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Self

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tightfit.capture.dispatch import fallback, one_card, program_operators
from tightfit.capture.dispatch.arguments.argument_checks import check_arguments, check_generator
from tightfit.capture.dispatch.arguments.other_dtypes import for_the_rule
from tightfit.capture.dispatch.cached_casts import CachedCasts
from tightfit.capture.dispatch.call_cache import CallCache
from tightfit.capture.dispatch.device_storages import DeviceStorages
from tightfit.capture.dispatch.on_host.hosts import HostMemory
from tightfit.capture.dispatch.operator_log import OperatorLog
from tightfit.capture.dispatch.operators import OperatorFacts, are_alike, facts, tensors
from tightfit.capture.dispatch.values.data_dependent_conditions import DataDependentConditions
from tightfit.capture.dispatch.values.data_reads import ReadPolicy
from tightfit.capture.dispatch.values.known_values import KnownValues
from tightfit.capture.observe.attribution import Attribution
from tightfit.capture.observe.kernel_memory import KernelMemory
from tightfit.capture.observe.recorder import Recorder
from tightfit.errors import faults
from tightfit.errors.program_errors import IN_A_THREAD
from tightfit.tape import Category

aten = torch.ops.aten

CUDA = torch.device("cuda", 0)

_DEVICE_OF = torch.ops.prim.device.default

# Factories that may be asked for a tensor on another device than that of their first argument. Offloaders make the host memory for a tensor so.
_AS_ANOTHER = frozenset(
    getattr(getattr(aten, name), overload)
    for name in (
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
        *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
    )
    for overload in getattr(aten, name).overloads()
)

_ASSUMED_OF_FAKES = "its outputs are those of its fake implementation; memory that it allocates besides is not seen, and its time is that of one pass over its arguments"

Handler = Callable[["VirtualGpu", OpOverload, Sequence[Any], Mapping[str, Any]], Any]


def _names_the_card(args: Sequence[Any]) -> bool:
    """Whether a device among the positional arguments is the card: `aten.to.device` has it there."""
    return any(isinstance(a, torch.device) and a.type == "cuda" for a in args)


@functools.cache
def _is_wrapper(kind: type) -> bool:
    module = kind.__module__
    return module.partition(".")[0] not in ("torch", "tightfit") or module.startswith("torch.distributed.")


class _SharedFakeMode(FakeTensorMode):
    """The fake tensors of one virtual GPU. A tensor refers to its mode, and a copy of it belongs to the same one.

    `threads` are those of Python's that the virtual GPU is in; `used_in_a_thread` is the error that an operator has raised in another one, and `runs_a_model` is
    called where one of `threads` beside the main one is about to run a model.
    """

    runs_a_model: Callable[[], None] = staticmethod(lambda: None)

    used_in_a_thread: Exception | None = None

    def __init__(self) -> None:
        # Without fallback kernels: torch would run an operator without a shape rule for real
        # (`run_fallback_kernel`), whatever its size and without a word. `fallback` does that within bounds.
        super().__init__(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        self.cache_enabled = False
        self.threads = {threading.get_ident()}

    @faults.hands_over
    def __enter__(self) -> Self:
        # A virtual tensor's class enters its mode where no mode takes the operator: nothing would record it, and the mode's state is not for two threads
        # at once.
        if self.is_in_another_thread():
            self.refuse_this_thread()
        return super().__enter__()

    def is_in_another_thread(self) -> bool:
        """Whether the caller runs in a thread of the program's own that the trace does not follow; those of autograd's own are not Python's."""
        number = threading.get_ident()
        if number in self.threads:
            return False
        thread = threading._active.get(number)  # type: ignore[attr-defined]
        return thread is not None and not isinstance(thread, threading._DummyThread)

    def refuse_this_thread(self) -> NoReturn:
        """Ends the use of the virtual GPU in this thread, and the trace with it: one that follows threads is tried next."""
        self.used_in_a_thread = NotImplementedError(f"Could not run an operator with {IN_A_THREAD}")
        raise faults.for_torch(self.used_in_a_thread)

    def __deepcopy__(self, memo: object) -> Self:
        return self


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
        self.reads = ReadPolicy(self.attribution.where, recorder.assume, self.attribution.modules)
        self.known_values = KnownValues()
        self.casts = CachedCasts(self.attribution)
        self.host = HostMemory(recorder)
        self.fake = _SharedFakeMode()
        self.calls = CallCache(self.fake)
        self.conditions = DataDependentConditions()
        self.storages = DeviceStorages(recorder, self.known_values, self.conditions)
        self.has_side_streams = False
        self.on_backward_end: Callable[[], None] | None = None
        self.communication: dict[
            OpOverload, Handler
        ] = {}  # the operators of process groups, of tensors on the host too
        self._handlers = dict(handlers)
        self.kernels = kernels
        self._composites = composites
        self.operators = OperatorLog(
            recorder, self.attribution, self.storages, kernels, self.known_values, self.conditions
        )

    def handle(self, func: OpOverload, handler: Handler) -> None:
        """Has `handler` run an operator that the program has defined."""
        self._handlers[func] = handler

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would wrap the method below for its compiler, which never sees it.
        return False

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # Asked for each `tensor.device`, so it is answered without a dispatch. Together with keeping torch's
        # compiler out (patches/eager.py) this took a trace of GPT-2 from 5.3 to 3.3 s (docs/log.md, "Start-up
        # time").
        if func is _DEVICE_OF:
            return args[0].fake_device
        # Tensors of libraries that wrap others, and sharded ones, take an operator apart themselves, into operators that come here again.
        if any(map(_is_wrapper, types)):
            return NotImplemented
        try:
            return self._dispatch(func, types, args, kwargs or {})
        except Exception as error:
            faults.note(error, "the capture")
            raise

    def _dispatch(self, func: OpOverload, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        if fake is not None and fake is not self.fake:
            # The program, or DTensor, asks for shapes alone. Such a mode is below all others, whenever it was entered.
            return func(*args, **kwargs)
        if self.communication and func in self.communication:
            return self.communication[func](self, func, args, kwargs)
        device = kwargs.get("device")
        if device is not None and one_card.is_renamed(device):
            kwargs = {**kwargs, "device": CUDA}
        is_of_host = FakeTensor not in types and (device is None or torch.device(device).type != "cuda")
        if not is_of_host and device is not None and func in _AS_ANOTHER and torch.device(device).type == "cpu":
            is_of_host, args = True, (_shape_of(args[0]), *args[1:])
        if "generator" in kwargs and (device is None or torch.device(device).type != "meta"):
            check_generator(kwargs["generator"], is_of_host=is_of_host)
        if is_of_host:
            if torch.is_inference_mode_enabled() and facts(func).is_composite and _names_the_card(args):
                return self._take_apart(func, args, kwargs)
            return self.host.run(func, args, kwargs)
        handler = self._handlers.get(func)
        if self._is_whole(func, args, has_handler=handler is not None):
            return self._take_apart(func, args, kwargs)
        if handler is not None:
            check_arguments(func, args, kwargs)
        return handler(self, func, args, kwargs) if handler else self.run(func, args, kwargs)

    def _is_whole(self, func: OpOverload, args: Sequence[Any], *, has_handler: bool) -> bool:
        """Whether `func` is made of others, and has arrived whole: under inference mode, or with tensors that were made under it."""
        if torch.is_inference_mode_enabled():
            return func in self._composites or facts(func).is_composite
        return not has_handler and facts(func).is_composite and any(tensor.is_inference() for tensor in tensors(args))

    @faults.hands_over
    def _take_apart(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if func is aten.dropout.default and not (args[2] and args[1]):
            # `at::dropout` returns its input then (aten/src/ATen/native/Dropout.cpp); torch's decomposition in Python copies it.
            return args[0]
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
        if "generator" in kwargs:
            # The virtual card's generators are host generators (patches/torch_api.py), which fake kernels
            # refuse for `cuda` tensors.
            kwargs = {**kwargs, "generator": None}
        key = self.calls.key(func, known, args, kwargs, is_adjusted=adjust is not None)
        call = None if key is None else self.calls.find(key)
        if call is not None:
            out = self.calls.outputs(call, args)
            if not known.is_view:
                self.operators.record(func, known, args, kwargs, out, call)
            return out
        check_arguments(func, args, kwargs)
        has_run, out = self._run_by_torch(func, known, args, kwargs)
        if has_run:
            return out
        if adjust is not None:
            out = adjust(out)
        if key is not None:
            call = self.calls.remember(key, known, args, out)
        if not known.is_view:
            self.operators.record(func, known, args, kwargs, out, call)
        return out

    def _run_by_torch(
        self, func: OpOverload, known: OperatorFacts, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[bool, Any]:
        """Whether the operator was run and recorded, by operators that it is made of, and its outputs."""
        is_own = program_operators.is_own(func)
        composed = program_operators.composed(func) if is_own else None
        if composed is not None:
            return True, program_operators.run_body(self, composed, args, kwargs)
        lifted = [self.lift(a) if isinstance(a, torch.Tensor) and not isinstance(a, FakeTensor) else a for a in args]
        try:
            # Lists as long as a model has parameters, which torch's fake tensors would go through for nothing.
            out = None
            if not (known.updates_lists and are_alike(lifted)):
                lifted = for_the_rule(func, lifted, self.empty)
                out = self.fake.dispatch(func, (FakeTensor,), lifted, kwargs)
        except (*fallback.UNSUPPORTED, RuntimeError) as error:
            if not isinstance(error, fallback.UNSUPPORTED) and not program_operators.lacks_fake(error):
                raise
            has_run, out = program_operators.try_body(self, func, args, kwargs) if is_own else (False, None)
            return has_run, out if has_run else fallback.run(self, func, args, kwargs)
        if is_own:
            self.recorder.assume(self.attribution.where(), f"{known.name}: {_ASSUMED_OF_FAKES}")
        return False, out

    def lift(self, host: torch.Tensor) -> FakeTensor:
        """A fake host tensor of the same shape: FakeTensorMode would memoise the real one and keep it alive."""
        return self.empty(host.size(), host.stride(), host.dtype, host.device)

    def new(
        self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, category: Category = Category.TEMPORARIES
    ) -> FakeTensor:
        """A new tensor on the device; it belongs to the operator that was noted last."""
        out = self.empty(size, stride, dtype)
        self.storages.add(out, category)
        return out

    def empty(
        self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device = CUDA
    ) -> FakeTensor:
        """A tensor, by default on the device, that is not recorded yet."""
        return self.calls.new(size, stride, dtype, device)


def _shape_of(tensor: torch.Tensor) -> torch.Tensor:
    """All that a factory asks of the tensor that it is given."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
