"""What a run in a lower precision saves, from the tape of the run in float32."""

import dataclasses
from typing import Literal

import numpy as np

from tightfit.analysis.gradient_readers import fraction_in_low_precision, scales_loss
from tightfit.analysis.optimizer import OptimizerProfile
from tightfit.analysis.profile import Profile
from tightfit.cost.classes import TENSOR_CORE_CLASSES, operator_class
from tightfit.cost.roofline import operator_seconds
from tightfit.tape import Column, Phase, Tape

Rounding = Literal["stochastic", "compensated"]

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
