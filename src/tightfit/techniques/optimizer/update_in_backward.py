"""Optimizer-in-backward: each parameter is updated as soon as its gradient is complete, and the gradient is freed: they are never all allocated.

Lv et al., "Full parameter fine-tuning for large language models with limited resources" (LOMO, arXiv:2306.09782); the hook is torch's
`register_post_accumulate_grad_hook`. Clipping by the norm of all gradients needs that norm before the first update, and a step that the script leaves
out must not be made: so the backward pass runs twice, as in that paper with clipping, the first time for the norms alone, the second time in the
optimizer's step.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, final

from tightfit.analysis.gradient_readers import readers_of_gradients, updates_in_backward
from tightfit.analysis.optimizer import OptimizerProfile, sides_of_kernels
from tightfit.analysis.optimizer_algorithm import family_of, implementation_of
from tightfit.analysis.profile import Profile
from tightfit.analysis.updates import (
    BACKWARD_SLOT,
    gradients_used_up,
    obstacle,
    retained_passes,
    sides_of_second_pass,
    states_come_early,
    waiting_for_second_pass,
)
from tightfit.planner.option import Change, Option
from tightfit.planner.sides import Sides
from tightfit.planner.suggestion import Suggestion
from tightfit.techniques.optimizer.optimizer_kernel import sides_of_fused
from tightfit.techniques.technique import AbstractTechnique, ChosenOption, Needs

if TYPE_CHECKING:
    from tightfit.techniques.session import Session


@final
class UpdateInBackward(AbstractTechnique):
    """Trades kernel launches (all tensors are updated one by one), and a second backward pass, for the memory of the gradients."""

    name = "update_in_backward"
    exact = True
    needs = Needs.GRADIENTS
    exactness = (
        "bit for bit: the same update of every parameter from the same gradient; with the fused kernel up to rounding, and where gradients "
        "are clipped on a GPU, up to the order in which their norm is summed"
    )
    tolerance = 0.15

    def options(self, profile: Profile) -> Iterable[Option]:
        """With the optimizer's present implementation, and with the fused one."""
        run = profile.optimizer
        if not run.step_ranges or updates_in_backward(run) or obstacle(run):
            return []
        clips, longer = bool(readers_of_gradients(run)), waiting_for_second_pass(run)
        kernels = ["same", *(["fused"] if family_of(run) != "other" and implementation_of(run) != "fused" else [])]
        again, passes = sides_of_second_pass(run), retained_passes(run)
        sides = {kernel: again + _update_sides(run, kernel) - run.sides for kernel in kernels}
        return [
            Option(
                technique=self.name,
                where="optimizer",
                settings={"kernel": kernel, "clips": clips},
                changes=(*_changes(run, kernel), *longer),
                seconds=run.step.added(sides[kernel]),
                sides=sides[kernel],
                exact=self.exact,
                slots=frozenset({"optimizer", BACKWARD_SLOT}),
                retains=passes,
            )
            for kernel in kernels
        ]

    def advice(self, profile: Profile) -> Iterable[Suggestion]:
        """Advice on what keeps gradients from being freed early."""
        run = profile.optimizer
        reason = obstacle(run)
        if not run.step_ranges or updates_in_backward(run) or not reason:
            return []
        held = int(run.block_bytes[run.gradients(run.step_ranges[-1])].sum())
        what = f"gradients cannot be consumed within the backward pass, because {reason}"
        return [Suggestion(what=what, saves_bytes=held)]

    def apply(self, session: "Session", chosen: Sequence[ChosenOption]) -> None:
        """Takes over the gradients of every parameter of the session's optimizers."""
        from tightfit.techniques.optimizer.apply_update_in_backward import apply_update_in_backward

        apply_update_in_backward(session, chosen)


def _update_sides(run: OptimizerProfile, kernel: str) -> Sides:
    """The time of the updates per step when every tensor has its own kernels."""
    total = Sides()
    for step_range in run.steady:
        num_tensors = len(run.gradients(step_range))
        if kernel == "fused" or implementation_of(run) == "fused":
            # Two kernels for each tensor: the step counter and the update (torch/optim/adam.py, `_fused_adam`).
            total += sides_of_fused(run, step_range, num_kernels=2 * num_tensors)
        else:
            kernels = sum(num_tensors if "_foreach_" in name else 1 for name in run.names(step_range))
            total += sides_of_kernels(run, step_range, kernels)
    return total


def _changes(run: OptimizerProfile, kernel: str) -> tuple[Change, ...]:
    """Gradients and the temporaries of the optimizer's step are gone, except those of one tensor's update."""
    found = [*gradients_used_up(run), *states_come_early(run)]
    for step_range in run.step_ranges:
        gradients = run.gradients(step_range)
        if run.held(step_range) and kernel == "same":
            largest = int(run.block_bytes[gradients].max(initial=0))
            found.append(
                Change(begin=int(run.allocated_at[gradients].min()), end=step_range.begin_event, num_bytes=largest)
            )
    return tuple(change for change in found if change.end > change.begin)
