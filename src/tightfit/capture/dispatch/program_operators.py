"""Operators that the program or a library of its own defines with `torch.library`: how one runs on the virtual GPU.

* `triton_op`: its body runs, so that its launches and what it allocates are recorded.
* With a fake implementation (`register_fake`, a Meta kernel): its outputs are those of it.
* Without one, but with an implementation for the card in Python: that runs, on virtual tensors.
* Else on the host, on zeros (`tightfit.capture.dispatch.fallback`), or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload

from tightfit.capture.replace import replace
from tightfit.errors import TightfitError
from tightfit.errors.faults import hands_over

if TYPE_CHECKING:
    from tightfit.capture.dispatch.virtual import VirtualGpu

# What torch itself and torchvision define, and techniques of ours. Their operators have rules, or rules of ours.
_OF_TORCH = frozenset(
    (
        "aten",
        "prim",
        "prims",
        "c10d",
        "fsdp",
        "inductor",
        "mkldnn",
        "onednn",
        "quantized",
        "tightfit",
        "torchvision",
        "triton",
    )
)
# "c10d_functional", and the same with an underscore.
_COLLECTIVES = ("c10d_", "_c10d")
# As torch/_library/custom_ops.py says it; there is no class of its own for it.
_NO_FAKE = "There was no fake impl registered for"
# The keys that an operator on the card runs, the first that there is.
_KEYS = ("CUDA", "CompositeExplicitAutograd")

_bodies: dict[tuple[str, str], Callable[..., Any]] = {}
_of_triton: dict[str, Callable[..., Any]] = {}


def install() -> None:
    """Remembers what the program registers in Python from now on."""
    library, triton_op = torch.library.Library, torch.library.triton_op
    register = library.impl

    @hands_over
    def impl(self: Any, op_name: Any, fn: Any, dispatch_key: str = "", **kwargs: Any) -> Any:
        out = register(self, op_name, fn, dispatch_key, **kwargs)
        key = dispatch_key or self.dispatch_key
        if key in _KEYS and fn is not torch.library.fallthrough_kernel and not kwargs.get("with_keyset"):
            name = op_name.name() if isinstance(op_name, OpOverload) else op_name
            _bodies[f"{self.ns}::{name.rpartition('::')[2]}", key] = fn
        return out

    @hands_over
    def triton_op_(name: str, fn: Any = None, /, **kwargs: Any) -> Any:
        if fn is None:
            return lambda function: triton_op_(name, function, **kwargs)
        _of_triton[name] = fn
        return triton_op(name, fn, **kwargs)

    replace(library, impl=impl)
    # `wrap_triton` shows launches to the compiler, which does not run here.
    replace(torch.library, triton_op=triton_op_, wrap_triton=lambda kernel: kernel)


def is_own(func: OpOverload) -> bool:
    """Whether `func` is none of torch's."""
    return func.namespace not in _OF_TORCH and not func.namespace.startswith(_COLLECTIVES)


def lacks_fake(error: Exception) -> bool:
    """Whether `error` says that a custom operator has no fake implementation."""
    return isinstance(error, RuntimeError) and str(error).startswith(_NO_FAKE)


def composed(func: OpOverload) -> Callable[..., Any] | None:
    """The function of a `triton_op`."""
    return _of_triton.get(func.name())


def body(func: OpOverload) -> Callable[..., Any] | None:
    """The implementation in Python that a card runs."""
    return next((_bodies[func.name(), key] for key in _KEYS if (func.name(), key) in _bodies), None)


@hands_over
def run_body(gpu: VirtualGpu, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs the Python of an operator on the virtual GPU, which records what is in it."""
    with gpu:
        return function(*args, **kwargs)


def try_body(gpu: VirtualGpu, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
    """Whether `func` has an implementation in Python that ran, and its outputs. Others call native code, which has no data here."""
    function = body(func)
    if function is None:
        return False, None
    try:
        return True, run_body(gpu, function, args, kwargs)
    except TightfitError:
        raise
    except Exception:  # noqa: BLE001 - whatever native code says of tensors without data
        return False, None
