"""Casts of a model's inputs and outputs for a forward in another floating-point dtype, and the saving of such a forward on a tape."""

import dataclasses
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map

from tightfit.analysis.gradient_readers import fraction_in_low_precision, scales_loss
from tightfit.analysis.optimizer import OptimizerProfile
from tightfit.analysis.profile import Profile
from tightfit.cost.classes import TENSOR_CORE_CLASSES, operator_class
from tightfit.cost.roofline import operator_seconds
from tightfit.tape import Column, Phase, Tape
from tightfit.techniques.wrappers.first_order import Refuse

# Cards from this compute capability on multiply in bfloat16 (CUDA C++ programming guide, table of arithmetic instructions).
_FIRST_WITH_BFLOAT16 = (8, 0)
# Below this part of all FLOPs in 16 bits a run is one in float32.
_IS_FULL_PRECISION = 0.05


def can_be_lowered(run: OptimizerProfile) -> bool:
    """Whether a run is in float32 and the card supports bfloat16."""
    operators = run.tape.operators
    has_bfloat16 = run.device.vendor != "nvidia" or run.device.compute_capability >= _FIRST_WITH_BFLOAT16
    return (
        has_bfloat16
        and float(operators.flops.sum()) > 0
        and fraction_in_low_precision(run) < _IS_FULL_PRECISION
        and not scales_loss(run)
    )


def seconds_saved_in_bfloat16(profile: Profile, *, everything: bool) -> float:
    """The time saved per step with matrix products, convolutions and attention in bfloat16, or with everything in bfloat16, in seconds."""
    tape = profile.tape
    lowered = _is_pass(tape) & (np.isin(tape.operators.dtype, indices_of(tape, "float32")))
    if not everything:
        cores = [i for i in np.unique(tape.operators.name) if operator_class(tape.strings[i]) in TENSOR_CORE_CLASSES]
        lowered &= np.isin(tape.operators.name, cores)
    operators = dataclasses.replace(
        tape.operators,
        dtype=np.where(lowered, len(tape.strings), tape.operators.dtype).astype(np.int32),
        bytes_read=np.where(lowered, tape.operators.bytes_read // 2, tape.operators.bytes_read),
        bytes_written=np.where(lowered, tape.operators.bytes_written // 2, tape.operators.bytes_written),
    )
    lower = dataclasses.replace(tape, operators=operators, strings=(*tape.strings, "bfloat16"))
    return float((profile.seconds - operator_seconds(lower, profile.device)).sum()) / profile.num_steps


def indices_of(tape: Tape, text: str) -> list[int]:
    """The indices of `text` among the strings of a tape."""
    return [i for i, known in enumerate(tape.strings) if known == text]


def born_in_float32(tape: Tape) -> Column:
    """Which storages were allocated by a float32 operator of a forward or backward pass."""
    born_of = tape.storages.operator
    known = born_of >= 0
    found = np.zeros(len(born_of), dtype=bool)
    operators = born_of[known]
    found[known] = _is_pass(tape)[operators] & np.isin(tape.operators.dtype[operators], indices_of(tape, "float32"))
    return found


def _is_pass(tape: Tape) -> Column:
    return np.isin(tape.operators.phase, (Phase.FORWARD, Phase.BACKWARD))


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


def cast_results(values: Any, target: torch.dtype, refuse: Refuse) -> Any:
    """What a model returns, its tensors in bfloat16 as tensors of type `target`. `watch_inputs_of_backward` is to be on."""
    waiting = [v for v in tree_leaves(values) if isinstance(v, torch.Tensor) and v.dtype == torch.bfloat16]
    if sum(v.requires_grad for v in waiting) < 2:
        return cast(values, torch.bfloat16, target)
    known = {id(v): _CastBesides.apply(v, target, refuse) if v.requires_grad else v.to(target) for v in waiting}
    return tree_map(lambda v: known.get(id(v), v), values)


def cast(values: Any, source: torch.dtype, target: torch.dtype) -> Any:
    """The nested `values`, with tensors of dtype `source` cast to `target`."""
    return tree_map(lambda v: v.to(target) if isinstance(v, torch.Tensor) and v.dtype == source else v, values)
