"""What a run in a lower precision saves, from the tape of the run in float32."""

import dataclasses
from typing import Literal

import numpy as np

from tightfit.analysis.gradient_readers import fraction_in_low_precision, scales_loss
from tightfit.analysis.intervals import changes, memory_timeline
from tightfit.analysis.optimizer import OptimizerProfile, sides_of_kernels, sides_of_update
from tightfit.analysis.profile import Profile
from tightfit.cost.classes import TENSOR_CORE_CLASSES, operator_class
from tightfit.cost.roofline import operator_seconds
from tightfit.planner.option import Change
from tightfit.planner.sides import Sides
from tightfit.tape import Category, Column, Phase, Tape

Rounding = Literal["stochastic", "compensated"]

# float32 tensors of the size of one parameter while it is updated: itself, its gradient, and the optimizer's two intermediate results.
_NUM_COPIES_IN_UPDATE = 4
_KERNELS_PER_UPDATE = 8  # to float32 and back, and the random numbers, besides the optimizer's own
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
    return float((profile.costs.seconds - operator_seconds(lower, profile.device)).sum()) / profile.num_steps


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


def changes_in_bfloat16(run: OptimizerProfile, rounding: Rounding) -> tuple[Change, ...]:
    """What is held otherwise with weights, gradients and activations in bfloat16 and each weight in float32 while it is updated."""
    storages, num_events = run.tape.storages, len(run.tape.events)
    parameters = storages.category == Category.PARAMETERS
    halved = np.flatnonzero(parameters | (storages.category == Category.GRADIENTS) | born_in_float32(run.tape))
    found = list(
        changes(memory_timeline(run.allocated_at[halved], run.freed_at[halved], run.block_bytes[halved]), -0.5)
    )
    for step_range in run.step_ranges:
        found += changes(run.held(step_range), -1.0)
        largest = int(run.block_bytes[run.gradients(step_range)].max(initial=0))
        found.append(
            Change(begin=step_range.begin_event, end=step_range.end_event, num_bytes=_NUM_COPIES_IN_UPDATE * largest)
        )
    if rounding == "compensated":
        first = run.step_ranges[0]
        rest_bytes = int(run.block_bytes[run.gradients(first)].sum()) // 2
        found.append(Change(begin=first.end_event, end=num_events, num_bytes=rest_bytes))
    return tuple(change for change in found if change.end > change.begin)


def sides_of_updates_in_float32(run: OptimizerProfile) -> Sides:
    """The time to cast each tensor to float32, update it by itself, and round it."""
    total = Sides()
    for step_range in run.steady:
        gradients = run.gradients(step_range)
        kernels = sum(len(gradients) if "_foreach_" in name else 1 for name in run.names(step_range))
        casts = sides_of_update(
            run, _KERNELS_PER_UPDATE * int(run.block_bytes[gradients].sum()), _KERNELS_PER_UPDATE * len(gradients)
        )
        total += sides_of_kernels(run, step_range, kernels) + casts
    return total
