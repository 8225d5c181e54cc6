"""Parameters, gradients and activations in bfloat16, with updates that are not lost: stochastic rounding, or compensated summation.

See `tightfit.techniques.precision.stochastic_rounding` for both. Optimizer states stay in float32: an average of squares that changes by a
thousandth per step would not change at all with eight significant bits.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, final

import numpy as np

from tightfit.analysis.intervals import changes, memory_timeline
from tightfit.analysis.optimizer import OptimizerProfile, seconds_of_kernels, seconds_of_update
from tightfit.analysis.profile import Profile
from tightfit.planner.option import Change, Option
from tightfit.tape import Category
from tightfit.techniques.precision.lower_precision import (
    Rounding,
    born_in_float32,
    can_be_lowered,
    seconds_saved_in_bfloat16,
)
from tightfit.techniques.technique import AbstractTechnique, Choice, Needs

if TYPE_CHECKING:
    from tightfit.techniques.session import Session

# float32 tensors of the size of one parameter while it is updated: itself, its gradient, and the optimizer's two intermediate results.
_NUM_COPIES_IN_UPDATE = 4
_KERNELS_PER_UPDATE = 8  # to float32 and back, and the random numbers, besides the optimizer's own


@final
class PureBf16(AbstractTechnique):
    """Trades the lower 16 bits of everything except optimizer states for half of its bytes and the speed of bfloat16."""

    name = "pure_bf16"
    exact = False
    needs = Needs.STEPS
    exactness = "lossy: forward and backward pass in 8 significant bits; updates in float32, rounded at random (right on average) or kept to 16 bits"
    tolerance = 0.4

    def options(self, profile: Profile) -> Iterable[Option]:
        """Two options for a run in float32: stochastic rounding, and compensated summation, which needs two bytes more per parameter."""
        run = profile.optimizer
        if not can_be_lowered(run) or not run.step_ranges:
            return []
        saved_seconds = seconds_saved_in_bfloat16(profile, everything=True)
        roundings: tuple[Rounding, ...] = ("stochastic", "compensated")
        return [
            Option(
                technique=self.name,
                where="precision",
                settings={"rounding": rounding},
                changes=_changes(run, rounding),
                seconds=_update_seconds(run) - run.seconds - saved_seconds,
                exact=self.exact,
                slots=frozenset({"precision", "optimizer"}),
                needs_new_trace=True,
            )
            for rounding in roundings
        ]

    def apply(self, session: "Session", chosen: Sequence[Choice]) -> None:
        """Casts parameters, buffers, and the model's inputs and outputs, and takes over the optimizers' updates."""
        from tightfit.techniques.precision.apply_pure_bf16 import apply_pure_bf16

        apply_pure_bf16(session, chosen)


def _changes(run: OptimizerProfile, rounding: Rounding) -> tuple[Change, ...]:
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


def _update_seconds(run: OptimizerProfile) -> float:
    """The time to cast each tensor to float32, update it by itself, and round it."""
    total = 0.0
    for step_range in run.steady:
        gradients = run.gradients(step_range)
        kernels = sum(len(gradients) if "_foreach_" in name else 1 for name in run.names(step_range))
        casts = seconds_of_update(
            run, _KERNELS_PER_UPDATE * int(run.block_bytes[gradients].sum()), _KERNELS_PER_UPDATE * len(gradients)
        )
        total += seconds_of_kernels(run, step_range, kernels) + casts
    return total
