"""Records the operators that a model applies to logits between the head and the loss, instead of running them.

Only operators that keep each token's logits together can be recorded: slices of the leading dimensions, views, permutations, casts, a scale, a
tanh. They are applied at once to the hidden states, which are smaller by the ratio of the vocabulary to the width.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from tightfit.techniques.lazy_tensors.deferral import name_of
from tightfit.techniques.loss_head.chunked_cross_entropy import Cast, Pointwise, Scale, Tanh

Step: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The recorded operators on the logits of a head, and their effect.

    `hidden` are the hidden states with the same operators applied to their leading dimensions; the vocabulary is dimension `vocabulary`.
    `meta` has the shape, strides and dtype.
    """

    steps: tuple[Step, ...]
    hidden: torch.Tensor
    pointwise: tuple[Pointwise, ...]
    vocabulary: int
    meta: torch.Tensor

    def replayed(self, logits: torch.Tensor) -> torch.Tensor:
        """The recorded operators applied to real logits."""
        for func, args, kwargs in self.steps:
            logits = func(logits, *args, **kwargs)
        return logits

    def after(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> "Form | None":
        """The form after a further call; None if the logits must be materialised."""
        write_down = _WRITTEN_DOWN.get(name_of(func))
        return None if write_down is None else write_down(func, self, args, kwargs)


def _cast(func: Callable[..., Any], form: Form, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Form | None:
    name = name_of(func)
    target = _CASTS.get(name)
    if target is None:
        # Where no copy leaves the device there is nothing to wait for.
        given = [*args, *(value for key, value in kwargs.items() if key != "non_blocking")]
        target = next((value for value in given if isinstance(value, torch.dtype)), form.meta.dtype)
        if not all(value is target or _is_device_of(value, form.hidden) for value in given):
            return None
    elif args or kwargs:
        return None
    if target not in _CASTS.values():
        return None
    change = () if target is form.meta.dtype else (Cast(source=form.meta.dtype, target=target),)
    # Of the device of the logits a tensor of the meta device cannot be.
    return _next(form, func, args, kwargs, meta=form.meta.to(target), pointwise=(*form.pointwise, *change))


def _is_device_of(value: Any, tensor: torch.Tensor) -> bool:
    if not isinstance(value, str | torch.device):
        return False
    device = torch.device(value)
    return device.type == tensor.device.type and device.index in (None, tensor.device.index)


def _scale(func: Callable[..., Any], form: Form, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Form | None:
    if kwargs or len(args) != 1 or type(args[0]) not in (int, float):
        return None
    change = Scale(factor=args[0], divides="div" in name_of(func))
    return _next(form, func, args, kwargs, pointwise=(*form.pointwise, change))


def _tanh(func: Callable[..., Any], form: Form, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Form | None:
    if args or kwargs:
        return None
    return _next(form, func, args, kwargs, pointwise=(*form.pointwise, Tanh()))


def _same(func: Callable[..., Any], form: Form, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Form | None:
    return None if args or kwargs else _next(form, func, args, kwargs)


def _reshape(func: Callable[..., Any], form: Form, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Form | None:
    # `Tensor.view(dtype)` reinterprets bits.
    if form.vocabulary != form.meta.dim() - 1 or any(isinstance(value, torch.dtype) for value in args):
        return None
    meta = func(form.meta, *args, **kwargs)
    if not meta.dim() or meta.shape[-1] != form.meta.shape[-1]:
        return None
    hidden = form.hidden.reshape(*meta.shape[:-1], form.hidden.shape[-1])
    return _next(form, func, args, kwargs, hidden=hidden, vocabulary=meta.dim() - 1)


def _permute(func: Callable[..., Any], form: Form, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Form | None:
    # Sizes 0, 1, 2, ... on the meta device: the shape of the result is the permutation, whichever function made
    # it.
    probe = torch.empty(tuple(range(form.meta.dim())), device="meta")
    order = tuple(func(probe, *args, **kwargs).shape)
    return _next(form, func, args, kwargs, hidden=form.hidden.permute(order), vocabulary=order.index(form.vocabulary))


def _index(func: Callable[..., Any], form: Form, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Form | None:
    index = args[0] if isinstance(args[0], tuple) else (args[0],)
    if form.vocabulary != form.meta.dim() - 1 or not _leaves_last(index, form.meta.dim()):
        return None
    hidden = form.hidden[index]
    return _next(form, func, args, kwargs, hidden=hidden, vocabulary=hidden.dim() - 1)


def _leaves_last(index: tuple[Any, ...], num_dimensions: int) -> bool:
    """Whether the basic index `index` leaves the last dimension whole and last."""
    if not all(part is None or part is Ellipsis or type(part) in (int, slice) for part in index):
        return False
    consuming = [part for part in index if part is not None and part is not Ellipsis]
    reaches_last = len(consuming) == num_dimensions or (Ellipsis in index and index[-1] is not Ellipsis)
    return not reaches_last or index[-1] == slice(None)


def _next(form: Form, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], **changed: Any) -> Form:
    meta = changed.pop("meta", None)
    return dataclasses.replace(
        form,
        steps=(*form.steps, (func, tuple(args), dict(kwargs))),
        meta=func(form.meta, *args, **kwargs) if meta is None else meta,
        **changed,
    )


_CASTS = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
}

_WRITTEN_DOWN: dict[str, Callable[..., Form | None]] = (
    dict.fromkeys((*_CASTS, "to"), _cast)
    | dict.fromkeys(("mul", "multiply", "__mul__", "__rmul__", "div", "divide", "true_divide", "__truediv__"), _scale)
    | {"tanh": _tanh, "contiguous": _same, "__getitem__": _index}
    | dict.fromkeys(("view", "reshape", "flatten"), _reshape)
    | dict.fromkeys(("transpose", "permute", "swapaxes", "swapdims", "movedim"), _permute)
)
