"""Casts of a model's inputs and outputs for a forward in another floating-point dtype."""

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from tightfit.techniques.wrappers.first_order import Refuse, are_transforms_active

_ABOUT_TYPES = re.compile(r"bfloat16|dtype|scalar ?type", re.IGNORECASE)


@contextlib.contextmanager
def told_of_types(refuse: Refuse, how: str, technique: str) -> Iterator[None]:
    """Converts errors about dtypes, which the model would not raise in float32, to a refusal that explains them."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError) as error:
        if not _ABOUT_TYPES.search(str(error)):
            raise
        why = str(error).splitlines()[0]
        raise refuse(f"the model does not run {how} ({why}); leave {technique} out of the plan") from error


class _CastBesides(torch.autograd.Function):
    """One of several results, as another type. Others may come from it, whose gradients do not go through what it is cast to."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, target: torch.dtype, refuse: Refuse) -> torch.Tensor:
        def before_gradient() -> None:
            raise refuse(
                "the program asks for the gradient of one of several results of the model (a hook, retain_grad, autograd.grad), which were cast "
                "one by one; leave the other precision out of the plan"
            )

        ctx.source, ctx.before_gradient = value.dtype, before_gradient
        return value.to(target)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:  # pyrefly: ignore[bad-override]
        return grad_outputs[0].to(ctx.source), None, None


class _CastBack(torch.autograd.Function):
    """The result as another type; `check` is called when its backward pass begins."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, target: torch.dtype, check: Callable[[], None]) -> torch.Tensor:
        ctx.source, ctx.check = value.dtype, check
        return value.to(target)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:  # pyrefly: ignore[bad-override]
        ctx.check()
        return grad_outputs[0].to(ctx.source), None, None


def cast_results(values: Any, target: torch.dtype, refuse: Refuse, check: Callable[[], None] | None = None) -> Any:
    """What a model returns, its tensors in bfloat16 as tensors of type `target`. `watch_inputs_of_backward` is to be on. `check` is called when the backward
    pass of a single one begins."""
    waiting = [v for v in tree_leaves(values) if isinstance(v, torch.Tensor) and v.dtype == torch.bfloat16]
    if sum(v.requires_grad for v in waiting) < 2:
        # Functions of Python's have no forward-mode derivative, and no batched one.
        if check is None or are_transforms_active() or not any(v.requires_grad for v in waiting):
            return cast(values, torch.bfloat16, target)
        known = {id(v): _CastBack.apply(v, target, check) if v.requires_grad else v.to(target) for v in waiting}
        return tree_map(lambda v: known.get(id(v), v), values)
    known = {id(v): _CastBesides.apply(v, target, refuse) if v.requires_grad else v.to(target) for v in waiting}
    return tree_map(lambda v: known.get(id(v), v), values)


def cast(values: Any, source: torch.dtype, target: torch.dtype) -> Any:
    """The nested `values`, with tensors of dtype `source` cast to `target`."""
    return tree_map(lambda v: v.to(target) if isinstance(v, torch.Tensor) and v.dtype == source else v, values)
