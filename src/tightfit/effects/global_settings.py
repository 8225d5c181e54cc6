"""Settings of torch, and of libraries that programs compute with, that decide what code computes: how each is read, and how it is made again."""

import contextlib
import decimal
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.nn.utils import parametrize

from tightfit.errors.private_names import version_of

_cudnn, _mkldnn, _products = torch.backends.cudnn, torch.backends.mkldnn, torch.backends.cuda.matmul
_DECIMAL = ("prec", "rounding", "Emin", "Emax", "clamp")


def _of(holder: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    return lambda: getattr(holder, name), lambda value: setattr(holder, name, value)


def _of_backend(backend: str, kind: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """The precision of float32 there. The attributes of `torch.backends` say the same, and take four times as long to read, in every call of a block."""
    return (
        functools.partial(torch._C._get_fp32_precision_getter, backend, kind),
        functools.partial(torch._C._set_fp32_precision_setter, backend, kind),
    )


def _precision() -> str | None:
    try:
        return torch.get_float32_matmul_precision()
    # A program that gives precisions by their names for each backend has none for all.
    except RuntimeError:
        return None


def _put_precision(value: str | None) -> None:
    if value is not None:
        torch.set_float32_matmul_precision(value)


def _put_decimal(values: tuple[Any, ...]) -> None:
    context = decimal.getcontext()
    for name, value in zip(_DECIMAL, values, strict=True):
        setattr(context, name, value)


class _CachedWeights(dict[Any, Any]):
    """Weights that `torch.nn.utils.parametrize.cached` holds, by where they are read: the same as others if they are the same tensors."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, dict) and self.keys() == other.keys() and all(self[key] is other[key] for key in self)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # type: ignore[assignment]


def _put_cached_weights(value: _CachedWeights) -> None:
    parametrize._cache.clear()
    parametrize._cache.update(value)


@contextlib.contextmanager
def cached_weights_as_they_are() -> Iterator[None]:
    """Takes out what code inside adds to them: made of fake tensors, it would be found by the program's own run."""
    before = _CachedWeights(parametrize._cache)
    try:
        yield
    finally:
        if parametrize._cache or before:
            _put_cached_weights(before)


# Up to torch 2.8 there is one switch for products and one for convolutions; oneDNN's reads as None there, whatever it is.
_OF_BACKENDS = (
    (
        _of_backend("generic", "all"),
        _of_backend("cuda", "matmul"),
        _of_backend("cuda", "conv"),
        _of_backend("cuda", "rnn"),
        _of_backend("mkldnn", "matmul"),
        _of_backend("mkldnn", "conv"),
        _of_backend("mkldnn", "rnn"),
    )
    if version_of("torch") >= (2, 9)
    else (_of(_products, "allow_tf32"), _of(_cudnn, "allow_tf32"))
)
# Those that say how exactly float32 and half precision are multiplied. What is set for all backends comes before what is set for one, which it may change.
_PRECISIONS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (_precision, _put_precision),
    *_OF_BACKENDS,
    _of(_products, "allow_fp16_reduced_precision_reduction"),
    _of(_products, "allow_bf16_reduced_precision_reduction"),
    *((_of(_products, "allow_fp16_accumulation"),) if version_of("torch") >= (2, 7) else ()),
)
# Another attention kernel or the lack of cuDNN saves other tensors, and a second run then ends with an error about their number or shapes.
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    (torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed, torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp),
    _of(_cudnn, "enabled"),
    _of(_cudnn, "benchmark"),
    _of(_cudnn, "deterministic"),
    _of(_mkldnn, "enabled"),
    (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    *_PRECISIONS,
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (np.geterr, lambda value: np.seterr(**value)),
    (lambda: tuple([getattr(decimal.getcontext(), name) for name in _DECIMAL]), _put_decimal),
    (gc.isenabled, lambda value: gc.enable() if value else gc.disable()),
    _of(parametrize, "_cache_enabled"),
    # A block computes those that it finds none of, and saves other tensors then.
    (lambda: _CachedWeights(parametrize._cache), _put_cached_weights),
)
_FIRST_PRECISION = _SETTINGS.index(_PRECISIONS[0])


def values() -> tuple[Any, ...]:
    """What they are now."""
    return tuple([get() for get, _ in _SETTINGS])


def precisions() -> tuple[Any, ...]:
    """Those of them that decide how products are rounded: what a product that is computed at another time must have found."""
    return tuple([get() for get, _ in _PRECISIONS])


def precisions_of(read: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same, of what `values` has read."""
    return read[_FIRST_PRECISION : _FIRST_PRECISION + len(_PRECISIONS)]


def put(wanted: tuple[Any, ...], instead_of: tuple[Any, ...]) -> None:
    """Makes them what they were when `wanted` was read, where they are `instead_of`."""
    if wanted == instead_of:
        return
    for (get, make), value in zip(_SETTINGS, wanted, strict=True):
        # Read again: what was made before this one may have changed it.
        if get() != value:
            make(value)
