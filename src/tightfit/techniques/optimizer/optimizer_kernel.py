"""Chooses among torch's three implementations of an optimizer: fused, foreach and for-loop.

The foreach implementation is torch's default on a card. It computes intermediate results of all parameters at once, so for Adam it allocates as
much again as the parameters during a step; the for-loop allocates those of one parameter, and the fused kernel none. The fused kernel also reads
and writes everything only once (torch/optim/optimizer.py, `_foreach_doc` and `_fused_doc`).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, final

from tightfit.allocator.pools import MIN_BLOCK_BYTES
from tightfit.analysis.intervals import changes
from tightfit.analysis.optimizer import OptimizerProfile, OptimizerRange, sides_of_kernels, sides_of_update
from tightfit.analysis.optimizer_algorithm import family_of, implementation_of
from tightfit.analysis.profile import Profile
from tightfit.planner.option import Change, Option
from tightfit.planner.sides import Sides
from tightfit.techniques.technique import AbstractTechnique, ChosenOption

if TYPE_CHECKING:
    from tightfit.techniques.optimizer.updates.optimizer_kernels import Kernel
    from tightfit.techniques.session import Session

# A fused kernel takes the addresses of a limited number of tensors (ATen/native/cuda/MultiTensorApply.cuh: 30 to 110, by how many lists).
TENSORS_PER_FUSED_KERNEL = 30


SidesOf = Callable[[OptimizerProfile, OptimizerRange], Sides]


@final
class OptimizerKernel(AbstractTechnique):
    """Trades nothing (fused) or time (for-loop) for the intermediate results of the foreach implementation."""

    name = "optimizer_kernel"
    exact = True
    exactness = (
        "for-loop and foreach do the same operations on every element, bit for bit on a CPU; the fused kernel computes the same update and "
        "may round the last bit differently"
    )
    tolerance = 0.1
    is_alike_in_batches = True

    def options(self, profile: Profile) -> Iterable[Option]:
        """One option for each other implementation that this optimizer is known to have."""
        run = profile.optimizer
        if not run.step_ranges:
            return []
        runs, family = implementation_of(run), family_of(run)
        options = []
        if runs != "fused" and family != "other":
            options.append(self._option(run, "fused", _without_temporaries(run), sides_of_fused))
        if runs == "foreach":
            options.append(self._option(run, "for-loop", _one_at_a_time(run), _sides_of_loop))
        if runs == "for-loop" and family != "other":
            options.append(self._option(run, "foreach", _all_at_once(run), _sides_of_foreach))
        return options

    def _option(
        self, run: OptimizerProfile, kernel: "Kernel", changed: tuple[Change, ...], sides_of: SidesOf
    ) -> Option:
        added = sum((sides_of(run, step_range) for step_range in run.steady), Sides()) - run.sides
        return Option(
            technique=self.name,
            where="optimizer",
            settings={"kernel": kernel},
            changes=changed,
            seconds=run.step.added(added),
            sides=added,
            exact=self.exact,
            slots=frozenset({"optimizer"}),
        )

    def apply(self, session: "Session", chosen: Sequence[ChosenOption]) -> None:
        """Sets the flags of every optimizer's groups."""
        from tightfit.techniques.optimizer.apply_optimizer_kernel import apply_optimizer_kernel

        apply_optimizer_kernel(session, chosen)


def sides_of_fused(run: OptimizerProfile, step_range: OptimizerRange, num_kernels: int = 0) -> Sides:
    """The time of `num_kernels` fused kernels, or of the fewest possible: gradients are read, parameters and states read and written, once."""
    updated = run.gradients(step_range)
    parameter_bytes = int(run.block_bytes[updated].sum())
    state_bytes = int(run.block_bytes[run.state(step_range)].sum())
    num_kernels = num_kernels or 1 + -(-len(updated) // TENSORS_PER_FUSED_KERNEL)
    return sides_of_update(run, 3 * parameter_bytes + 2 * state_bytes, num_kernels)


def _without_temporaries(run: OptimizerProfile) -> tuple[Change, ...]:
    removed = tuple(change for step_range in run.step_ranges for change in changes(run.held(step_range), -1.0))
    if family_of(run) == "sgd":
        return removed
    first = run.step_ranges[
        0
    ]  # Adam and Adagrad count steps, one number for each tensor, which the fused kernel wants on the card
    count_bytes = MIN_BLOCK_BYTES * len(run.gradients(first))
    return (*removed, Change(begin=first.begin_event, end=len(run.tape.events), num_bytes=count_bytes))


def _one_at_a_time(run: OptimizerProfile) -> tuple[Change, ...]:
    """The for-loop instead of foreach: the intermediate results of the largest tensor instead of those of all."""
    found: list[Change] = []
    for step_range in run.step_ranges:
        held = run.held(step_range)
        if not held:
            continue
        largest = int(run.block_bytes[run.gradients(step_range)].max(initial=0))
        most = max(num_bytes for _, _, num_bytes in held)
        # Adam's root of the second moment and that root divided are alive together (torch/optim/adam.py, `_single_tensor_adam`).
        instead = min(most, (2 if family_of(run) == "adam" else 1) * largest)
        found.extend(changes(held, -1.0))
        found.append(Change(begin=held[0][0], end=held[-1][1], num_bytes=instead))
    return tuple(found)


def _all_at_once(run: OptimizerProfile) -> tuple[Change, ...]:
    """Foreach instead of the for-loop: one intermediate result of all tensors where the loop has any of one tensor."""
    found: list[Change] = []
    for step_range in run.step_ranges:
        held = run.held(step_range)
        if held:
            all_bytes = int(run.block_bytes[run.gradients(step_range)].sum())
            found.extend(changes(held, -1.0))
            found.append(Change(begin=held[0][0], end=held[-1][1], num_bytes=all_bytes))
    return tuple(found)


def _sides_of_loop(run: OptimizerProfile, step_range: OptimizerRange) -> Sides:
    num_tensors = max(1, len(run.gradients(step_range)))
    num_kernels = sum(num_tensors if "_foreach_" in name else 1 for name in run.names(step_range))
    return sides_of_kernels(run, step_range, num_kernels)


def _sides_of_foreach(run: OptimizerProfile, step_range: OptimizerRange) -> Sides:
    num_kernels = len(run.names(step_range)) / max(1, len(run.gradients(step_range)))
    return sides_of_kernels(run, step_range, round(num_kernels) + 1)
