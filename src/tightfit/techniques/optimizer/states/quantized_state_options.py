"""Options of the techniques with quantised or factored states, from a tape: between steps, or with updates in the backward pass too.

While a parameter is updated its states are dequantised, and either the optimizer's own intermediate results or the temporaries of quantising a
piece of a state are allocated beside them: in the backward pass once a gradient is complete, or else within the optimizer's step.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from tightfit.analysis.gradient_readers import readers_of_gradients
from tightfit.analysis.intervals import changes
from tightfit.analysis.optimizer import OptimizerProfile, OptimizerRange, sides_of_kernels, sides_of_update
from tightfit.analysis.optimizer_algorithm import element_bytes_of, family_of, implementation_of
from tightfit.analysis.updates import (
    BACKWARD_SLOT,
    either,
    gradients_used_up,
    moments_of_updates,
    obstacle,
    retained_passes,
    sides_of_second_pass,
    states_come_early,
    waiting_for_second_pass,
)
from tightfit.planner.option import Change, Option
from tightfit.planner.sides import Sides
from tightfit.tape import Column
from tightfit.techniques.optimizer.optimizer_kernel import sides_of_fused
from tightfit.techniques.optimizer.states.state_sizes import MIN_NUMBERS, NUMBERS_PER_PIECE


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Coding:
    """The cost of a state format: `bytes_kept` per element, `part` the fraction of all states that it applies to.

    Quantising and dequantising one element moves `bytes_moved` besides the element itself, which is read or written `num_passes` times, and
    allocates `bytes_between` for each element of a piece, `bytes_more_in_16_bits` more if the state is not in float32.
    """

    bytes_kept: float
    part: float = 1.0
    bytes_moved: int
    num_passes: int
    kernels_per_piece: int
    numbers_per_piece: int = NUMBERS_PER_PIECE
    bytes_between: int
    bytes_more_in_16_bits: int = 0


def coded_options(
    run: OptimizerProfile, coding: Coding, *, technique: str, settings: Mapping[str, Any] | None = None
) -> list[Option]:
    """Options with states in this format: with a plain optimizer step, and with updates in the backward pass if there is no obstacle.

    Each is offered with the optimizer's present implementation, tensor by tensor, and with the fused one.
    """
    clips, again = bool(readers_of_gradients(run)), sides_of_second_pass(run)
    found = []
    for is_fused in (False, True) if family_of(run) != "other" and implementation_of(run) != "fused" else (False,):
        given = {**(settings or {}), **({"kernel": "fused"} if is_fused else {})}
        sides = _sides(run, coding, is_fused=is_fused)
        found.append(_option(run, technique, given, _changes_of_step(run, coding, is_fused=is_fused), sides))
        if not obstacle(run):
            changed = _changes_in_backward(run, coding, is_fused=is_fused)
            given = {**given, "in_backward": True, "clips": clips}
            option = _option(run, technique, given, changed, sides + again)
            found.append(dataclasses.replace(option, retains=retained_passes(run)))
    return found


def _option(
    run: OptimizerProfile, technique: str, settings: Mapping[str, Any], changed: tuple[Change, ...], sides: Sides
) -> Option:
    return Option(
        technique=technique,
        where="optimizer",
        settings=settings,
        changes=tuple(change for change in changed if change.end > change.begin and change.num_bytes),
        seconds=run.step.added(sides),
        sides=sides,
        exact=False,
        slots=frozenset({"optimizer", BACKWARD_SLOT} if settings.get("in_backward") else {"optimizer"}),
    )


def _changes_of_step(run: OptimizerProfile, coding: Coding, *, is_fused: bool) -> tuple[Change, ...]:
    found = list(smaller_states(run, coding))
    for step_range in run.step_ranges:
        found += changes(run.held(step_range), -1.0)
        most = int(_temporary_bytes(run, coding, step_range, is_fused=is_fused).max(initial=0))
        found.append(Change(begin=step_range.begin_event, end=step_range.end_event, num_bytes=most))
    return tuple(found)


def _changes_in_backward(run: OptimizerProfile, coding: Coding, *, is_fused: bool) -> tuple[Change, ...]:
    while_updated = list(states_come_early(run, fraction_left(run, coding)))
    for step_range in run.step_ranges:
        moments = moments_of_updates(run, run.gradients(step_range)).tolist()
        temporary = _temporary_bytes(run, coding, step_range, is_fused=is_fused).tolist()
        while_updated += changes((at, at + 1, num_bytes) for at, num_bytes in zip(moments, temporary, strict=True))
    held = either(waiting_for_second_pass(run), tuple(while_updated))
    return (*smaller_states(run, coding), *gradients_used_up(run), *held)


def smaller_states(run: OptimizerProfile, coding: Coding) -> tuple[Change, ...]:
    """States shrink to the bytes kept, except small ones."""
    large = _large(run, run.state(run.step_ranges[-1]))
    begins = np.maximum(run.allocated_at[large], run.step_ranges[0].begin_event)
    sizes = run.tape.storages.num_bytes[large]
    step_ranges = zip(begins.tolist(), run.freed_at[large].tolist(), sizes.tolist(), strict=True)
    return changes(step_ranges, -coding.part * (1.0 - _fraction_kept(run, coding)))


def fraction_left(run: OptimizerProfile, coding: Coding) -> float:
    """The remaining fraction of the bytes of all states, small ones included."""
    states = run.state(run.step_ranges[-1])
    total, large = int(run.block_bytes[states].sum()), int(run.block_bytes[_large(run, states)].sum())
    return 1.0 - coding.part * (1.0 - _fraction_kept(run, coding)) * large / max(1, total)


def _fraction_kept(run: OptimizerProfile, coding: Coding) -> float:
    return min(1.0, coding.bytes_kept / element_bytes_of(run))


def _temporary_bytes(run: OptimizerProfile, coding: Coding, step_range: OptimizerRange, *, is_fused: bool) -> Column:
    """The temporaries besides gradients and quantised states while each parameter with a gradient is updated, in bytes."""
    size = element_bytes_of(run)
    gradients = run.gradients(step_range)
    numbers = run.block_bytes[gradients] / size
    state_bytes, gradient_bytes = (
        int(run.block_bytes[which].sum()) for which in (run.state(step_range), run.gradients(step_range))
    )
    num_coded = round(state_bytes / max(1, gradient_bytes)) * coding.part * (numbers >= MIN_NUMBERS)
    results = num_results(run, step_range, is_fused=is_fused) * size * numbers
    between = coding.bytes_between + (coding.bytes_more_in_16_bits if size < np.dtype(np.float32).itemsize else 0)
    coded = coding.bytes_kept * numbers + between * np.minimum(numbers, coding.numbers_per_piece)
    restored = num_coded * max(0.0, size - coding.bytes_kept) * numbers
    return (restored + np.where(num_coded > 0, np.maximum(results, coded), results)).astype(np.int64)


def num_results(run: OptimizerProfile, step_range: OptimizerRange, *, is_fused: bool) -> int:
    """How many tensors of the size of a parameter its update alone allocates."""
    if is_fused or not run.held(step_range):
        return 0
    # Adam's root of the second moment and that root divided are alive together (torch/optim/adam.py, `_single_tensor_adam`).
    return 2 if family_of(run) == "adam" else 1


def _sides(run: OptimizerProfile, coding: Coding, *, is_fused: bool) -> Sides:
    """The extra time per step in seconds: updates one by one, and the traffic and kernels of quantisation."""
    total = Sides()
    for step_range in run.steady:
        num_tensors = len(run.gradients(step_range))
        if is_fused or implementation_of(run) == "fused":
            # Two kernels for each tensor: the step counter and the update (torch/optim/adam.py, `_fused_adam`).
            total += sides_of_fused(run, step_range, num_kernels=2 * num_tensors)
        else:
            kernels = sum(num_tensors if "_foreach_" in name else 1 for name in run.names(step_range))
            total += sides_of_kernels(run, step_range, kernels)
        numbers = run.block_bytes[_large(run, run.state(step_range))] / element_bytes_of(run)
        num_pieces = int(np.ceil(numbers / coding.numbers_per_piece).sum())
        moved = coding.part * (coding.bytes_moved + coding.num_passes * element_bytes_of(run)) * float(numbers.sum())
        total += sides_of_update(run, moved, round(coding.part * coding.kernels_per_piece * num_pieces))
    return total - run.sides


def _large(run: OptimizerProfile, states: Column) -> Column:
    return states[run.block_bytes[states] >= MIN_NUMBERS * element_bytes_of(run)]
