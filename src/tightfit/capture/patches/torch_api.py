"""Patches outside of `torch.cuda` where torch checks the type of a tensor, and a virtual tensor must pass for a real one.

The most important one is identity: `module.to("cuda")` on a card changes each parameter in place, so an optimizer made before the move, and
weights that are tied, keep the same objects. Here the contents of the object are swapped with those of a virtual tensor.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.jit import _builtins
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import _foreach_supported_types as optimizer_types
from torch.utils._device import _device_constructors
from torch.utils._foreach_utils import _foreach_supported_types as foreach_types
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map

from tightfit.capture.dispatch import one_card, program_operators, shapes
from tightfit.capture.dispatch.arguments.argument_checks import GENERATORS
from tightfit.capture.dispatch.cached_casts import CachedCasts
from tightfit.capture.dispatch.virtual import VirtualGpu
from tightfit.capture.kernels.attention import flex
from tightfit.capture.observe.streams import VirtualStream
from tightfit.capture.patches import gradients_of_data, graphs, legacy, libraries, registered_memory, saving
from tightfit.capture.replace import replace
from tightfit.errors.faults import for_torch, hands_over


def install(gpu: VirtualGpu) -> None:
    """Applies all patches; a process that has done this is not used for anything else."""
    gpu.casts.install()
    _keep_identity_on_moves(gpu.casts)
    _skip_initialisers(gpu)
    _treat_as_plain_tensors()
    _install_tensor_methods(gpu)
    _install_compile(gpu)
    _install_reading(gpu)
    _install_construction()
    _install_ctc_loss(gpu)
    saving.install(gpu)
    legacy.install()
    graphs.install()
    registered_memory.install(gpu.host.storages)
    one_card.install()
    shapes.install()
    program_operators.install()
    libraries.install(gpu)
    # The fused kernel of `nn.TransformerEncoderLayer` in evaluation works on nested tensors, which have no fake ones.
    torch.backends.mha.set_fastpath_enabled(False)
    _construct_above_modes(gpu)


def _construct_above_modes(gpu: VirtualGpu) -> None:
    """Makes `torch.tensor(..., device="cuda")` build on the host and copy, which a mode sees. The switch is thread-local; autograd has its own thread."""
    # FakeTensorMode sets the same switch while it is entered (torch/_subclasses/fake_tensor.py, `__enter__`);
    # here it stays.
    torch._C._set_only_lift_cpu_tensors(True)
    # A first backward pass makes the engine's thread for the card, and a hook runs on it: there is no other way
    # to set a switch of that thread.
    with gpu.fake:
        here = torch.zeros((), device="cuda", requires_grad=True)
        there = here * 1
        there.register_hook(lambda _: torch._C._set_only_lift_cpu_tensors(True))
        there.backward()


def become(target: torch.Tensor, value: torch.Tensor) -> None:
    """Gives the object `target` the contents of `value`, sharing its storage, as `target.data = value` does between ordinary tensors."""
    is_parameter, requires_grad = isinstance(target, torch.nn.Parameter), target.requires_grad
    # Other data keeps the gradient it has.
    gradient = target.grad if target.is_leaf else None
    if gradient is not None:
        target.grad = None  # it counts as a use of the tensor whose contents are exchanged
    names = {
        k: v
        for k, v in target.__dict__.items()
        # What FakeTensor keeps in its `__dict__` belongs to the contents; attributes that the program has set
        # belong to the object.
        if k not in ("fake_mode", "fake_device", "constant", "item_memo", "_is_param")
    }
    other = value.detach().requires_grad_(requires_grad)
    if is_parameter:
        if type(other) is torch.Tensor:
            other = torch.nn.Parameter(other, requires_grad)
        else:
            other._is_param = True
    other.__dict__.update(names)
    for name in ("__class__", "__dict__"):
        held = getattr(target, name)
        setattr(target, name, getattr(other, name))
        setattr(other, name, held)
    # As torch.utils.swap_tensors does, which refuses tensors that something refers to weakly: optimizers and
    # hooks do.
    torch._C._swap_tensor_impl(target, other)
    # torch itself keeps one of another shape or dtype too, which no tensor can be given afterwards.
    gradients_of_data.keep(target, gradient)
    if is_parameter and requires_grad:
        gradients_of_data.hand_on(other, target)


def _are_on_one(tensor: FakeTensor, other: FakeTensor) -> bool:
    return tensor.fake_device == other.fake_device and torch._has_compatible_shallow_copy_type(tensor, other)


def _keep_identity_on_moves(casts: CachedCasts) -> None:
    data: Any = torch._C.TensorBase.data

    @hands_over
    def set_data(self: torch.Tensor, value: torch.Tensor) -> None:
        is_virtual = isinstance(self, FakeTensor)
        if (
            isinstance(value, torch.Tensor)
            and is_virtual
            and isinstance(value, FakeTensor)
            and _are_on_one(self, value)
        ):
            # Torch's own keeps hooks on the gradient, and gradients of other shapes, as `DistributedDataParallel` and FSDP rely on.
            data.__set__(self, value)
        elif isinstance(value, torch.Tensor) and (is_virtual or isinstance(value, FakeTensor)):
            casts.release(self)
            become(self, value)
        else:
            data.__set__(self, value)

    replace(torch.Tensor, data=property(data.__get__, set_data))
    replace(torch.nn.Module, _apply=_apply)


def _apply(
    module: torch.nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> torch.nn.Module:
    """`Module._apply`, which moves and casts: torch's own would make new parameters where one of the tensors is a fake one."""
    if recurse:
        for child in module.children():
            child._apply(function)
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        if is_lazy(parameter):
            _move_when_made(parameter, function)
            continue
        gradient = parameter.grad
        parameter.grad = None  # it counts as a use of the tensor whose contents are exchanged
        with torch.no_grad():
            moved = module._parameters[name] = _moved(parameter, function(parameter))
            if gradient is not None:
                moved.grad = _moved(gradient, function(gradient))
    for name, buffer in module._buffers.items():
        if buffer is None:
            continue
        if is_lazy(buffer):
            _move_when_made(buffer, function)
        else:
            module._buffers[name] = function(buffer)
    return module


def _move_when_made(tensor: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Defers a move or cast of a lazy parameter until its shape is known."""

    def materialize(shape: Any, device: Any = None, dtype: Any = None) -> None:
        del tensor.materialize
        type(tensor).materialize(tensor, shape, device, dtype)
        tensor.data = function(tensor.data)

    tensor.materialize = materialize


def _moved(tensor: torch.Tensor, value: torch.Tensor) -> Any:
    if value is tensor:
        return tensor
    if is_traceable_wrapper_subclass(value):
        torch.utils.swap_tensors(tensor, torch.nn.Parameter(value, tensor.requires_grad))
    elif (
        isinstance(tensor, FakeTensor)
        or isinstance(value, FakeTensor)
        or torch._has_compatible_shallow_copy_type(tensor, value)
    ):
        tensor.data = value
    else:
        return torch.nn.Parameter(value, tensor.requires_grad)
    return tensor


def _skip_initialisers(gpu: VirtualGpu) -> None:
    def skipping(initialise: Callable[..., Any]) -> Callable[..., Any]:
        @hands_over
        @functools.wraps(initialise)
        def maybe(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if isinstance(tensor, FakeTensor) or (tensor.layout == torch.strided and gpu.host.is_blank(tensor)):
                return tensor
            return initialise(tensor, *args, **kwargs)

        return maybe

    for name in dir(torch.nn.init):
        if name.endswith("_") and not name.startswith("_"):
            setattr(torch.nn.init, name, skipping(getattr(torch.nn.init, name)))


def _treat_as_plain_tensors() -> None:
    # `type(p) in _foreach_supported_types` (torch/optim/optimizer.py, torch/utils/_foreach_utils.py) decides
    # over the foreach kernels, whose temporaries are as large as all parameters; a subclass would get the
    # for-loop.
    optimizer_types.append(FakeTensor)
    foreach_types.append(FakeTensor)


def _install_tensor_methods(gpu: VirtualGpu) -> None:
    def record_stream(self: torch.Tensor, stream: VirtualStream) -> None:
        index = gpu.storages.index_of(self)
        if index is not None:
            gpu.has_side_streams = True
            gpu.recorder.use(index, stream.stream_id)

    # A CUDA generator cannot be made without a driver.
    class Generator(torch.Generator):
        """A host generator that reports the device it was made for; random data on the device does not exist."""

        def __new__(cls, device: Any = "cpu") -> torch.Generator:
            return torch._C.Generator.__new__(cls, device="cpu")  # pyrefly: ignore[unexpected-keyword]

        def __init__(self, device: Any = "cpu") -> None:
            self._device = torch.device(device)
            GENERATORS[self._cdata] = self  # pyrefly: ignore[missing-attribute]

        @property
        def device(self) -> torch.device:
            return self._device

    replace(
        torch.Tensor,
        record_stream=record_stream,
        pin_memory=lambda self, *_args, **_kwargs: gpu.host.storages.pinned_copy(self),
        is_pinned=lambda self, *_args, **_kwargs: gpu.host.storages.is_pinned(self),
    )
    replace(torch, Generator=Generator)
    resize = torch.UntypedStorage.resize_

    def resize_(self: torch.UntypedStorage, size: int) -> Any:
        before = self.nbytes()
        resized = resize(self, size)
        # No operator, so that no mode sees it.
        if self.device.type == "meta" and self.nbytes() != before:
            gpu.storages.resize_storage(self, self.nbytes())
        return resized

    replace(torch.UntypedStorage, resize_=resize_)


def _install_reading(gpu: VirtualGpu) -> None:
    """Patches formatting and conversion to numpy, which check the type of the tensor first."""
    write, to_numpy = torch.Tensor.__format__, torch.Tensor.numpy

    @hands_over
    def write_(self: torch.Tensor, specification: str) -> str:
        if isinstance(self, FakeTensor) and self.dim() == 0:
            return self.detach().item().__format__(specification)
        return write(self, specification)

    @hands_over
    def to_numpy_(self: torch.Tensor, *, force: bool = False) -> Any:
        if not isinstance(self, FakeTensor):
            return to_numpy(self, force=force)
        if force:
            return to_numpy(self.detach().cpu(), force=True)
        raise for_torch(
            TypeError(
                f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
            )
        )

    to_list = FakeTensor.tolist

    @hands_over
    def to_list_(self: FakeTensor) -> Any:
        before = gpu.recorder.waits.number
        values = to_list(self)
        # Fake tensors read element by element, where a card makes one copy to the host.
        gpu.recorder.waits.forget(before + 1)
        return values

    as_array = torch.Tensor.__array__

    @hands_over
    def as_array_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return to_numpy_(self) if isinstance(self, FakeTensor) else as_array(self, *args, **kwargs)

    replace(torch.Tensor, __format__=write_, numpy=to_numpy_, __array__=as_array_)
    replace(FakeTensor, tolist=to_list_)
    from torch.nn.attention import flex_attention as flexible

    replace(flexible, flex_attention=flex.flex_attention)


def _install_construction() -> None:
    """`torch.tensor` reads the numbers in a list in C++, below every mode; virtual tensors among them are converted before."""

    def reading(construct: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @hands_over
        @functools.wraps(construct)
        def maybe(*args: Any, **kwargs: Any) -> torch.Tensor:
            try:
                return construct(*args, **kwargs)
            except NotImplementedError:
                return construct(*args[:-1], tree_map(_number, args[-1]), **kwargs)

        return maybe

    constructors = {name: reading(getattr(torch, name)) for name in ("tensor", "as_tensor")}
    _device_constructors().update(constructors.values())  # those that a default device applies to
    _replace_operators(**constructors)
    replace(torch.Tensor, new_tensor=reading(torch.Tensor.new_tensor))


def _replace_operators(**values: Callable[..., Any]) -> None:
    """Replaces functions of `torch` that are operators, and are so in TorchScript too: `torch.distributed.optim` has scripts that call them."""
    for name, value in values.items():
        operator = _builtins._find_builtin(getattr(torch, name))
        replace(torch, **{name: value})
        if operator is not None:
            _builtins._register_builtin(value, operator)


def _install_ctc_loss(gpu: VirtualGpu) -> None:
    """On a card the host reads the lengths first; under a dispatch mode torch takes another path, which wants them on the card."""
    plain = torch.ctc_loss

    @hands_over
    def ctc_loss(log_probs: torch.Tensor, targets: Any, input_lengths: Any, target_lengths: Any, *rest: Any) -> Any:
        if isinstance(log_probs, FakeTensor):
            input_lengths = _lengths(gpu, input_lengths, log_probs.size(0))
            target_lengths = _lengths(gpu, target_lengths, targets.size(-1))
        return plain(log_probs, targets, input_lengths, target_lengths, *rest)

    _replace_operators(ctc_loss=ctc_loss)


def _lengths(gpu: VirtualGpu, lengths: Any, longest: int) -> Any:
    if not isinstance(lengths, torch.Tensor):
        return lengths
    if isinstance(lengths, FakeTensor) and not gpu.known_values.known(lengths):
        return [longest] * lengths.numel()
    return lengths.tolist()


def _number(value: Any) -> Any:
    return value.tolist() if isinstance(value, FakeTensor) else value


def _install_compile(gpu: VirtualGpu) -> None:
    def compile_(model: Any = None, **_kwargs: Any) -> Any:
        gpu.recorder.assume(
            gpu.attribution.where(), "torch.compile: traced as eager code; a compiled run holds the same or less"
        )
        return model if model is not None else lambda function: function

    replace(torch, compile=compile_)
    replace(torch.nn.Module, compile=lambda self, *_args, **_kwargs: compile_())
