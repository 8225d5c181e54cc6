"""Runs code that is written for a card on the host, for the rest of a process that is used for nothing else.

Tensors requested on "cuda" are made on "cpu". With a card given, `torch.cuda` answers for it as in a trace, so that a program that asks takes the path
that was traced; without one `torch.cuda.is_available()` returns False, as on any machine without a card.
"""

import functools
import io
from collections.abc import Callable
from typing import Any

import torch

from tightfit.capture.kernels.architecture import Card
from tightfit.capture.observe.recorder import LiveMemory, Recorder
from tightfit.capture.patches.cuda_api import CudaApi
from tightfit.capture.replace import replace
from tightfit.devices.device import Device
from tightfit.errors.faults import hands_over

_FACTORIES = (
    *("arange", "as_tensor", "asarray", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace"),
    *("logspace", "normal", "ones", "ones_like", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like"),
    *("randperm", "tensor", "tril_indices", "triu_indices", "zeros", "zeros_like", "load"),
)
_NEW = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")
_NARROW = {"float64": ("float", "float32", "float16", "half", "bfloat16"), "complex128": ("cfloat", "complex64")}
_CASTS = {"double": ("float", "half", "bfloat16"), "cdouble": ("cfloat",)}
_WAITS = ("synchronize", "empty_cache", "reset_peak_memory_stats", "manual_seed", "manual_seed_all")


def install(card: Device | None) -> None:
    """Patches torch for the rest of the process; `torch.cuda` answers for `card`, if there is one."""
    if card is not None:
        # Nothing is recorded, so its memory reads as empty.
        recorder = Recorder()
        kernels = Card.of_build(card.compute_capability, card.num_multiprocessors)
        CudaApi(recorder, LiveMemory(recorder, card.capacity_bytes), card, kernels).install()
        replace(torch.Tensor, record_stream=_nothing(torch.Tensor.record_stream))
    for name in _FACTORIES:
        replace(torch, **{name: _host(getattr(torch, name))})
    for name in ("to", *_NEW):
        replace(torch.Tensor, **{name: _host(getattr(torch.Tensor, name))})
    replace(torch.nn.Module, to=_host(torch.nn.Module.to), cuda=_itself(torch.nn.Module.cuda))
    replace(torch.Tensor, cuda=_itself(torch.Tensor.cuda), pin_memory=_itself(torch.Tensor.pin_memory))
    replace(torch, set_default_device=_host(torch.set_default_device))
    replace(torch.autocast, __init__=_host(torch.autocast.__init__))
    for name in _WAITS:
        replace(torch.cuda, **{name: _nothing(getattr(torch.cuda, name))})


def compute_in_double() -> None:
    """Floating point numbers have double precision for the rest of the process, where the program asks for less by name too.

    Two correct runs then differ by rounding of 1e-16, so a wrong plan stands out from one that only sums in another order. A loss that is computed in
    float32 within, as libraries write it, would bring back rounding of 1e-7, of which Adam makes updates of full size.
    """
    torch.set_default_dtype(torch.float64)
    # torch makes its tables of types by name at first use, and keeps them.
    file = io.BytesIO()
    torch.save(torch.zeros(1), file)
    file.seek(0)
    torch.load(file)
    for wide, names in _NARROW.items():
        replace(torch, **dict.fromkeys(names, getattr(torch, wide)))
    for wide, names in _CASTS.items():
        for name in names:
            replace(torch.Tensor, **{name: _of_another_name(getattr(torch.Tensor, wide), name)})


def _of_another_name(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(torch.Tensor, name), updated=())
    def named(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return named


# Names are replaced and no TorchFunctionMode is used: one is off inside of `backward`, where code that runs
# again would ask for the card (docs/log.md, 2026-11-22).
def _host(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, with the host for every device that is a card."""

    @functools.wraps(function, updated=())
    @hands_over
    def on_host(*args: Any, **kwargs: Any) -> Any:
        kwargs = {name: False if name == "pin_memory" else _own(value) for name, value in kwargs.items()}
        return function(*map(_own, args), **kwargs)

    return on_host


def _own(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    is_card = isinstance(value, str) and (value == "cuda" or value.startswith("cuda:"))
    return "cpu" if is_card else value


def _itself(function: Callable[..., Any]) -> Callable[..., Any]:
    """A replacement of `function` that returns what it is called on. A new function each time: torch's compiler wants them to be distinct objects."""

    @functools.wraps(function, updated=())
    def itself(value: Any, *_: Any, **__: Any) -> Any:
        return value

    return itself


def _nothing(function: Callable[..., Any]) -> Callable[..., None]:
    @functools.wraps(function, updated=())
    def nothing(*_: Any, **__: Any) -> None:
        pass

    return nothing
