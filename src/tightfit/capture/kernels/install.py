"""Routes the operators that a CPU build of torch decomposes differently from a CUDA build.

Three kinds. Composites that ask for a compiled CUDA kernel and fall back (attention, recurrent layers) are replaced for CUDA tensors.
Operators that have both a CUDA kernel and a composite fallback (`silu_backward`, `mish_backward`, `_fused_rms_norm`) take the fallback where
no CUDA kernel is registered: registering one restores the true autograd formula, and a dispatch mode sees the whole operator. Operators that
lack an implementation by shape get one.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_impls import register_op_impl
from torch._subclasses.fake_tensor import FakeTensorMode

from tightfit.capture.kernels import recurrent
from tightfit.capture.kernels.architecture import Card
from tightfit.capture.kernels.attention.sdpa_backends import attention_on
from tightfit.capture.kernels.rule import HAS_RMS_NORM

# native_functions.yaml: operators with both a CUDA and a CompositeImplicitAutograd kernel.
_FUSED_ON_CUDA = ("silu_backward", "mish_backward", *(("_fused_rms_norm",) if HAS_RMS_NORM else ()))


def _fused_rms_norm(
    input: torch.Tensor,  # noqa: A002 - the operator's own name
    normalized_shape: list[int],
    _weight: torch.Tensor | None,
    _eps: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs of `aten::_fused_rms_norm` by shape: the normalised input and the inverse root mean square (layer_norm_kernel.cu)."""
    kept = input.dim() - len(normalized_shape)
    shape = [*input.shape[:kept], *(1 for _ in normalized_shape)]
    accumulate = torch.float32 if input.dtype in (torch.float16, torch.bfloat16) else input.dtype
    return torch.empty_like(input, memory_format=torch.contiguous_format), input.new_empty(shape, dtype=accumulate)


_SHAPES: dict[OpOverload, Callable[..., Any]] = {
    torch.ops.aten._cudnn_rnn.default: recurrent.cudnn_rnn,
    torch.ops.aten._cudnn_rnn_backward.default: recurrent.cudnn_rnn_backward,
}
if HAS_RMS_NORM:
    _SHAPES[torch.ops.aten._fused_rms_norm.default] = _fused_rms_norm


def _under_fake_mode(function: Callable[..., Any]) -> Callable[..., Any]:
    def implementation(fake_mode: FakeTensorMode, _operator: OpOverload, *args: Any, **kwargs: Any) -> Any:
        with fake_mode:
            return function(*args, **kwargs)

    return implementation


def _never_runs(name: str) -> Callable[..., Any]:
    def kernel(*_args: object, **_kwargs: object) -> None:
        raise RuntimeError(f"aten::{name} reached a CUDA kernel outside a capture")

    return kernel


def composites(card: Card) -> dict[OpOverload, Callable[..., Any]]:
    """The replaced composites, for a dispatch mode under `torch.inference_mode`.

    There every composite arrives undecomposed. Those listed here are to be called as they are, all others through `OpOverload.decompose`, in
    both cases with the mode active again.
    """
    aten = torch.ops.aten
    found: dict[OpOverload, Callable[..., Any]] = {aten.scaled_dot_product_attention.default: attention_on(card)}
    for name, function in recurrent.ROUTES.items():
        packet, overload = name.split(".")
        found[getattr(getattr(aten, packet), overload)] = function
    return found


def install(card: Card) -> torch.library.Library:
    """Registers the routes for fake CUDA tensors of this process and returns their owner; they end when it is dropped.

    A CUDA build of torch has the fused kernels already; attention and recurrent layers are routed there too, because their composites
    ask the driver for a card.
    """
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch remarks on every kernel that is replaced
        for operator, function in composites(card).items():
            # AutogradCUDA too: a composite with a CUDA kernel of its own would need a derivative formula and
            # has none. This way autograd sees the operators that the function calls.
            for key in ("AutogradCUDA", "CUDA"):
                library.impl(operator, function, key)
        for name in _FUSED_ON_CUDA:
            # A CUDA build has these kernels. Registering a second one there would replace the real one for the
            # whole process.
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):
                library.impl(name, _never_runs(name), "CUDA")
    for operator, function in _SHAPES.items():
        register_op_impl(operator)(_under_fake_mode(function))
    return library
