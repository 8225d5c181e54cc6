"""Mixed precision: matrix products, convolutions and attention in bfloat16, by `torch.autocast` around the model's forward pass.

Micikevicius et al., "Mixed precision training" (arXiv:1710.03740). Parameters, gradients and optimizer states stay in float32; bfloat16 has the
range of float32, so losses need no scaling. With float16 they do, and a `GradScaler` changes the training loop: that is only advised.
"""

from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING, final

import numpy as np

from tightfit.analysis.gradient_readers import fraction_in_low_precision, scales_loss
from tightfit.analysis.intervals import changes, memory_timeline
from tightfit.analysis.optimizer import OptimizerProfile, passes_of, sides_of_update
from tightfit.analysis.profile import Profile
from tightfit.cost.classes import operator_class
from tightfit.planner.option import Change, Option
from tightfit.planner.sides import Sides
from tightfit.planner.suggestion import Suggestion
from tightfit.tape import Category, Column, Phase, Tape
from tightfit.techniques.precision.lower_precision import born_in_float32, can_be_lowered, seconds_saved_in_bfloat16
from tightfit.techniques.technique import AbstractTechnique, ChosenOption

if TYPE_CHECKING:
    from tightfit.techniques.session import Session

# What autocast leaves in, or raises to, float32 (torch's "CUDA Ops that can autocast to float32"): those results stay as large.
_STAYS_LARGE = ("reduction", "other", "embedding")
# Attention by hand: softmax saves its float32 result for its own gradient, and the product with the values a bfloat16 copy of it.
_SOFTMAX = ("aten._softmax", "aten._safe_softmax")
# What embeddings return is float32, and float32 plus bfloat16 is float32: the residual stream of a language model stays as it is.
_EMBEDDINGS = ("aten.embedding",)
_SUMS = ("aten.add.Tensor",)


# Kernels for each product of a forward pass: its input, weight and bias to bfloat16, and their gradients back.
_CASTS_OF_A_PRODUCT = 6


@final
class Autocast(AbstractTechnique):
    """Trades seven to sixteen bits of the products' mantissas for half of most activations and the speed of tensor cores."""

    name = "autocast"
    exact = False
    exactness = "lossy: products are computed from operands rounded to 8 significant bits, and summed in float32; parameters stay float32"
    tolerance = 0.6
    is_alike_in_batches = True

    def options(self, profile: Profile) -> Iterable[Option]:
        """One option, in bfloat16, for a run in float32."""
        run = profile.optimizer
        if not can_be_lowered(run):
            return []
        parameter_bytes = _parameter_bytes(run)
        # Each weight is read in float32 and written in bfloat16 once per forward pass.
        casting = Sides(
            on_card=sides_of_update(run, 1.5 * parameter_bytes, 0).on_card, on_host=_seconds_to_issue_casts(profile)
        )
        sides = casting - Sides(on_card=seconds_saved_in_bfloat16(profile, everything=False))
        return [
            Option(
                technique=self.name,
                where="precision",
                settings={"dtype": "bfloat16"},
                changes=(*_smaller_activations(run), *_copies_of_weights(run, parameter_bytes)),
                seconds=profile.step.added(sides),
                sides=sides,
                exact=self.exact,
                slots=frozenset({"precision"}),
                needs_new_trace=True,
            )
        ]

    def advice(self, profile: Profile) -> Iterable[Suggestion]:
        """Advice to use float16 if the card has no bfloat16."""
        run = profile.optimizer
        low = fraction_in_low_precision(run)
        if (
            low > 0
            or scales_loss(run)
            or can_be_lowered(run)
            or profile.device.vendor != "nvidia"
            or not profile.tape.operators.flops.any()
        ):
            return []
        saved = int(run.block_bytes[profile.tape.storages.category == Category.ACTIVATIONS].sum()) // (
            2 * run.num_steps
        )
        what = (
            "this GPU has no bfloat16: torch.autocast in float16 with a torch.amp.GradScaler around backward and step"
        )
        return [Suggestion(what=what, saves_bytes=saved, changes="results")]

    def apply(self, session: "Session", chosen: Sequence[ChosenOption]) -> None:
        """Runs the model's forward under autocast and returns its results in float32, as the loss outside expects them."""
        from tightfit.techniques.precision.apply_autocast import apply_autocast

        apply_autocast(session, chosen)


def _parameter_bytes(run: OptimizerProfile) -> int:
    return int(run.block_bytes[run.tape.storages.category == Category.PARAMETERS].sum())


def _seconds_to_issue_casts(profile: Profile) -> float:
    num_products = int((profile.costs.is_product & (profile.tape.operators.phase == Phase.FORWARD)).sum())
    return _CASTS_OF_A_PRODUCT * profile.costs.efficiency.issue_seconds * num_products / profile.num_steps


def _smaller_activations(run: OptimizerProfile) -> tuple[Change, ...]:
    tape = run.tape
    names, name_of = np.unique(tape.operators.name, return_inverse=True)
    stays = np.array([operator_class(tape.strings[n]) in _STAYS_LARGE for n in names], dtype=bool)
    if _indices(tape, _EMBEDDINGS):
        stays |= np.isin(names, _indices(tape, _SUMS))
    saved = np.flatnonzero(born_in_float32(tape) & (tape.storages.category == Category.ACTIVATIONS))
    by = tape.storages.operator[saved]
    halved, copied = saved[~stays[name_of[by]]], saved[np.isin(tape.operators.name[by], _indices(tape, _SOFTMAX))]
    return (*_times(run, halved, -0.5), *_times(run, copied, 0.5))


def _indices(tape: Tape, names: Container[str]) -> list[int]:
    return [i for i, name in enumerate(tape.strings) if name in names]


def _times(run: OptimizerProfile, storages: Column, share: float) -> tuple[Change, ...]:
    return changes(
        memory_timeline(run.allocated_at[storages], run.freed_at[storages], run.block_bytes[storages]), share
    )


def _copies_of_weights(run: OptimizerProfile, parameter_bytes: int) -> tuple[Change, ...]:
    """bfloat16 copies of the weights are made during the forward pass and saved for the backward pass."""
    passes = passes_of(run)
    return tuple(Change(begin=begin, end=end, num_bytes=parameter_bytes // 2) for begin, end in passes)
