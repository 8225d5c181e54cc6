"""Optimizer offload: the states of an optimizer wait in host memory or on disk between its steps, and each parameter's are on the card while it is updated.

Ren et al., "ZeRO-Offload" (arXiv:2101.06840), but with the update on the card, by the script's own optimizer: what moves are the states, in both
directions at once, and neither gradients nor weights.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np

from tightfit.analysis.gradient_readers import readers_of_gradients, updates_in_backward
from tightfit.analysis.intervals import changes
from tightfit.analysis.optimizer import OptimizerProfile, OptimizerRange
from tightfit.analysis.optimizer_algorithm import element_bytes_of, family_of, implementation_of
from tightfit.analysis.profile import Profile
from tightfit.analysis.updates import (
    BACKWARD_SLOT,
    either,
    gradients_used_up,
    moments_of_updates,
    obstacle,
    retained_passes,
    sides_of_updates_in_backward,
    states_come_early,
    waiting_for_second_pass,
)
from tightfit.cost.disks import disk_seconds
from tightfit.engine.disk.disk_sizes import buffer_bytes_for, in_pages
from tightfit.planner.option import Change, Option
from tightfit.planner.sides import Sides
from tightfit.techniques.optimizer.at_host.offloaded_updates import (
    HOST_AHEAD,
    OffloadedUpdates,
    sides_on_host,
    updates_in_backward_pass,
    updates_in_step,
)
from tightfit.techniques.optimizer.at_host.streamed_updates import Streamed
from tightfit.techniques.optimizer.states.quantized_state_options import (
    Coding,
    coded_options,
    fraction_left,
    smaller_states,
)
from tightfit.techniques.optimizer.states.state_sizes import MIN_NUMBERS, MIN_ON_DISK
from tightfit.techniques.technique import AbstractTechnique, ChosenOption, Needs

if TYPE_CHECKING:
    from tightfit.techniques.session import Session

# Parts of the host memory begin at multiples of this.
_ALIGNMENT = 512
_CODING = Coding(bytes_kept=0.0, bytes_moved=0, num_passes=0, kernels_per_piece=0, bytes_between=0)
# Memory on the card for the states of so many parameters, of the largest one: what comes, is updated, and leaves. A wider window has to be faster.
_WINDOWS = (1, 2, 3)
_FASTER = 0.99


@final
class OptimizerOffload(AbstractTechnique):
    """Trades host memory or disk, and traffic on the link, for nearly all of the optimizer's states."""

    name = "optimizer_offload"
    exact = True
    needs = Needs.STEPS
    exactness = "the optimizer itself updates one parameter after the other: bit for bit with its own implementation, up to rounding with the fused kernel"
    tolerance = 0.15
    is_alike_in_batches = True

    def options(self, profile: Profile) -> Iterable[Option]:
        """With the optimizer's present implementation, tensor by tensor, and with the fused one; each in its step, and in the backward pass where there
        is no obstacle; with room for the states of one parameter, or of more where that is faster. And with updates by the host's processor,
        and with the states on disk.
        """
        run = profile.optimizer
        if not run.step_ranges or updates_in_backward(run) or not len(run.state(run.step_ranges[-1])):
            return
        kernels = [False, *([True] if family_of(run) != "other" and implementation_of(run) != "fused" else [])]
        for is_fused in kernels:
            yield from _in_step(self.name, run, is_fused=is_fused)
            if not obstacle(run):
                yield from _in_backward(self.name, run, is_fused=is_fused)
        # torch's fused SGD for the host goes wrong in half precision (`goes_wrong_at_host`).
        if family_of(run) not in ("other", "sgd" if element_bytes_of(run) < 4 else ""):
            yield from _on_host(self.name, run)
        yield from _on_disk(self.name, run)

    def apply(self, session: "Session", chosen: Sequence[ChosenOption]) -> None:
        """Replaces the optimizers' steps."""
        from tightfit.techniques.optimizer.apply_optimizer_offload import apply_optimizer_offload

        apply_optimizer_offload(session, chosen)


def _in_step(technique: str, run: OptimizerProfile, *, is_fused: bool) -> Iterator[Option]:
    of_steps = [updates_in_step(run, step_range, is_fused=is_fused) for step_range in run.steady]
    for window_bytes, found in _windows(run, of_steps):
        # In the first step, where states are made, one parameter's are there at a time.
        most = max(each.peak_bytes for each in found)
        changed = [*smaller_states(run, _CODING)]
        for step_range in run.step_ranges:
            changed += changes(run.held(step_range), -1.0)
            changed.append(Change(begin=step_range.begin_event, end=step_range.end_event, num_bytes=most))
        sides = sum((each.sides for each in found), Sides()) - run.sides
        yield _option(technique, run, changed, sides, window_bytes, is_fused=is_fused)


def _in_backward(technique: str, run: OptimizerProfile, *, is_fused: bool) -> Iterator[Option]:
    of_steps = [updates_in_backward_pass(run, step_range, is_fused=is_fused) for step_range in run.steady]
    for window_bytes, found in _windows(run, of_steps):
        while_updated = [*states_come_early(run, fraction_left(run, _CODING))]
        for step_range in run.step_ranges:
            while_updated += _beside_backward(run, step_range, window_bytes, is_fused=is_fused)
        held = either(waiting_for_second_pass(run), tuple(while_updated))
        changed = [*smaller_states(run, _CODING), *gradients_used_up(run), *held]
        # The second pass is among the seconds: the states move beside it.
        sides = sum((each.sides for each in found), sides_of_updates_in_backward(run)) - run.sides
        settings = {"in_backward": True, "clips": bool(readers_of_gradients(run))}
        option = _option(technique, run, changed, sides, window_bytes, is_fused=is_fused, settings=settings)
        yield dataclasses.replace(option, slots=frozenset({"optimizer", BACKWARD_SLOT}), retains=retained_passes(run))


def _beside_backward(
    run: OptimizerProfile, step_range: OptimizerRange, window_bytes: int, *, is_fused: bool
) -> Iterator[Change]:
    """What the updates of a step have on the card from the first gradient of its backward pass on."""
    found = updates_in_backward_pass(run, step_range, is_fused=is_fused).within(run, window_bytes)
    moments = np.sort(moments_of_updates(run, run.gradients(step_range))).tolist()
    ends = [*moments[1:], step_range.begin_event]
    for at, end, (while_updated, between) in zip(moments, ends, found.levels, strict=True):
        yield Change(begin=at, end=at + 1, num_bytes=while_updated)
        yield Change(begin=at + 1, end=end, num_bytes=between)


def _windows(run: OptimizerProfile, of_steps: Sequence[OffloadedUpdates]) -> Iterator[tuple[int, list[Streamed]]]:
    """Windows in bytes with what they give for each step: room for the largest parameter's states, and multiples of it that are faster."""
    largest = max((update.state_bytes for each in of_steps for update in each.updates), default=0)
    before = float("inf")
    others = run.step - run.sides
    for num_bytes in (largest * many for many in _WINDOWS):
        found = [each.within(run, num_bytes) for each in of_steps]
        seconds = sum((each.sides for each in found), others).seconds
        if seconds < _FASTER * before:
            before = seconds
            yield num_bytes, found


def _on_host(technique: str, run: OptimizerProfile) -> Iterator[Option]:
    """Updates by the host's processor: gradients go down and weights come up, and the states stay where they are."""
    of_steps = [updates_in_step(run, step_range, is_fused=False) for step_range in run.steady]
    largest = max((update.state_bytes for each in of_steps for update in each.updates), default=0)
    if not largest:
        return
    changed = [*smaller_states(run, _CODING)]
    for step_range in run.step_ranges:
        changed += changes(run.held(step_range), -1.0)
        if (run.allocated_at[run.state(step_range)] >= step_range.begin_event).any():
            # Where states are made, on the card.
            made = max(each.within(run, largest).peak_bytes for each in of_steps)
            changed.append(Change(begin=step_range.begin_event, end=step_range.end_event, num_bytes=made))
    sides = sum((sides_on_host(run, each) for each in of_steps), Sides()) - run.sides
    weights = [
        update.state_bytes // update.num_copies for each in of_steps for update in each.updates if update.num_copies
    ]
    beside = sum(map(_aligned, weights)) + (1 + HOST_AHEAD) * _aligned(max(weights))
    yield _option(technique, run, changed, sides, largest, is_fused=False, settings={"executor": "host"}, beside=beside)


def _on_disk(technique: str, run: OptimizerProfile) -> Iterator[Option]:
    """In the optimizer's step, tensor by tensor and with the fused kernel, with the states on disk."""
    sizes = run.tape.storages.num_bytes[run.state(run.step_ranges[-1])]
    sizes = sizes[sizes >= MIN_ON_DISK * element_bytes_of(run)].tolist()
    if not sizes:
        return
    # The states of two parameters are there at the same time: those that come, and those that leave.
    coding = dataclasses.replace(_CODING, numbers_per_piece=1 << 40, bytes_between=2 * element_bytes_of(run))
    disk_bytes = sum(map(in_pages, sizes))
    # One after the other: the disk either reads or writes, and a parameter's states are there before they are updated.
    seconds = sum(disk_seconds(size, to_disk=way) for size in sizes for way in (False, True))
    seconds *= len(run.steady) / run.num_steps
    settings = {"tier": "disk", "host_bytes": buffer_bytes_for(disk_bytes), "disk_bytes": disk_bytes}
    for option in coded_options(run, coding, technique=technique):
        if "in_backward" not in option.settings:
            sides = option.added_sides + Sides.both(seconds)
            yield dataclasses.replace(
                option,
                exact=True,
                settings={**option.settings, **settings, "least_elements": MIN_ON_DISK},
                seconds=run.step.added(sides),
                sides=sides,
                host_bytes=buffer_bytes_for(disk_bytes),
                disk_bytes=disk_bytes,
            )


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _option(
    technique: str,
    run: OptimizerProfile,
    changed: Sequence[Change],
    sides: Sides,
    window_bytes: int,
    *,
    is_fused: bool,
    settings: Mapping[str, Any] | None = None,
    beside: int = 0,
) -> Option:
    """`beside` are bytes at the host besides the states."""
    sizes = run.tape.storages.num_bytes[run.state(run.step_ranges[-1])]
    sizes = sizes[sizes >= MIN_NUMBERS * element_bytes_of(run)]
    host_bytes = sum(map(_aligned, sizes.tolist())) + beside
    given = {**({"kernel": "fused"} if is_fused else {}), **(settings or {})}
    return Option(
        technique=technique,
        where="optimizer",
        settings={**given, "host_bytes": host_bytes, "window_bytes": window_bytes},
        changes=tuple(change for change in changed if change.end > change.begin and change.num_bytes),
        seconds=run.step.added(sides),
        sides=sides,
        exact=True,
        slots=frozenset({"optimizer"}),
        host_bytes=host_bytes,
    )
