"""Parameters, gradients and activations in bfloat16, with updates that are not lost: stochastic rounding, or compensated summation.

See `tightfit.techniques.precision.stochastic_rounding` for both. Optimizer states stay in float32: an average of squares that changes by a
thousandth per step would not change at all with eight significant bits.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, final

from tightfit.analysis.profile import Profile
from tightfit.planner.option import Option
from tightfit.planner.sides import Sides
from tightfit.techniques.precision.lower_precision import (
    Rounding,
    can_be_lowered,
    changes_in_bfloat16,
    seconds_saved_in_bfloat16,
    sides_of_updates_in_float32,
)
from tightfit.techniques.technique import AbstractTechnique, ChosenOption, Needs

if TYPE_CHECKING:
    from tightfit.techniques.session import Session


@final
class PureBf16(AbstractTechnique):
    """Trades the lower 16 bits of everything except optimizer states for half of its bytes and the speed of bfloat16."""

    name = "pure_bf16"
    exact = False
    needs = Needs.STEPS
    exactness = "lossy: forward and backward pass in 8 significant bits; updates in float32, rounded at random (right on average) or kept to 16 bits"
    tolerance = 0.4
    is_alike_in_batches = True

    def options(self, profile: Profile) -> Iterable[Option]:
        """Two options for a run in float32: stochastic rounding, and compensated summation, which needs two bytes more per parameter."""
        run = profile.optimizer
        if not can_be_lowered(run) or not run.step_ranges:
            return []
        saved = Sides(on_card=seconds_saved_in_bfloat16(profile, everything=True))
        sides = sides_of_updates_in_float32(run) - run.sides - saved
        roundings: tuple[Rounding, ...] = ("stochastic", "compensated")
        return [
            Option(
                technique=self.name,
                where="precision",
                settings={"rounding": rounding},
                changes=changes_in_bfloat16(run, rounding),
                seconds=profile.step.added(sides),
                sides=sides,
                exact=self.exact,
                slots=frozenset({"precision", "optimizer"}),
                needs_new_trace=True,
            )
            for rounding in roundings
        ]

    def apply(self, session: "Session", chosen: Sequence[ChosenOption]) -> None:
        """Casts parameters, buffers, and the model's inputs and outputs, and takes over the optimizers' updates."""
        from tightfit.techniques.precision.apply_pure_bf16 import apply_pure_bf16

        apply_pure_bf16(session, chosen)
