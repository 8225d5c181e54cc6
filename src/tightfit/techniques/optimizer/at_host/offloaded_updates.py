"""The updates of an optimizer whose states are at the host, from a tape: their order, bytes and seconds, in a step of its own or in a backward pass."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from tightfit.analysis.intervals import runs_of
from tightfit.analysis.optimizer import OptimizerProfile, OptimizerRange, sides_of_update
from tightfit.analysis.optimizer_algorithm import element_bytes_of, implementation_of
from tightfit.analysis.updates import moments_of_updates
from tightfit.cost.copies import copy_seconds
from tightfit.cost.efficiency import efficiency_of
from tightfit.cost.host_bandwidth import HOST_BYTES_PER_SECOND
from tightfit.cost.host_python import HostWork
from tightfit.planner.sides import Sides
from tightfit.tape import Column, Phase
from tightfit.techniques.optimizer.at_host.streamed_updates import Streamed, StreamedUpdate, streamed
from tightfit.techniques.optimizer.states.quantized_state_options import num_results
from tightfit.techniques.optimizer.states.state_sizes import MIN_NUMBERS

# Gradients that come down besides that of the present update on the host.
HOST_AHEAD = 2
# Sums over rows and columns of the bits of a weight, after each update and before the next.
_PASSES_OF_SUMS = 4
# The gradient comes down, the weight goes up, and the sums of its bits are made and compared.
_ISSUED_FOR_UPDATE = 16
# A fused update has a kernel for the step counter besides (torch/optim/adam.py, `_fused_adam`).
_FUSED_KERNELS = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OffloadedUpdates:
    """`updates` in order; `issue_seconds` is the host's time for all of it, `seconds_after` that of computation after the last update."""

    updates: tuple[StreamedUpdate, ...]
    issue_seconds: float
    seconds_after: float = 0.0

    def within(self, run: OptimizerProfile, window_bytes: int) -> Streamed:
        """Their seconds and peak with at most `window_bytes` of states on the card."""
        return streamed(
            self.updates,
            window_bytes,
            lambda num_bytes, to_card: copy_seconds(num_bytes, run.device, to_card=to_card),
            seconds_after=self.seconds_after,
            issue_seconds=self.issue_seconds,
        )


def sides_on_host(run: OptimizerProfile, found: OffloadedUpdates) -> Sides:
    """Seconds of `found` where the host updates what has its states there: gradients come down, new weights go up, beside its own work."""
    down = up = host = on_card = 0.0
    sums = Sides()
    ended: list[float] = []
    for update in found.updates:
        if not update.num_copies:
            on_card += update.seconds
            continue
        num_bytes = update.state_bytes // update.num_copies
        begin = max(down, ended[-1 - HOST_AHEAD]) if len(ended) > HOST_AHEAD else down
        down = begin + copy_seconds(num_bytes, run.device, to_card=False)
        # The weight and each state are read and written, the gradient is read.
        host = max(host, down) + num_bytes * (3 + 2 * update.num_copies) / HOST_BYTES_PER_SECOND
        ended.append(host)
        up = max(up, host) + copy_seconds(num_bytes, run.device, to_card=True)
        sums += sides_of_update(run, _PASSES_OF_SUMS * num_bytes, _PASSES_OF_SUMS)
    # The card waits for all of it; what the host does besides, it does while the card is in its backward pass.
    num_moved = sum(1 for update in found.updates if update.num_copies)
    own = num_moved * (
        HostWork.OFFLOADED_PARAMETER.value + _ISSUED_FOR_UPDATE * efficiency_of(run.device).issue_seconds
    )
    return Sides(on_card=max(up, host) + on_card + sums.on_card, on_host=host + own)


def updates_in_step(run: OptimizerProfile, step_range: OptimizerRange, *, is_fused: bool) -> OffloadedUpdates:
    """One after the other in the step, in the order of the parameters."""
    states = run.state(step_range)
    sizes = run.tape.storages.num_bytes[states]
    num_states = _num_states(run, step_range)
    # The states of a parameter are made together, when it is first updated.
    large = sizes[sizes >= MIN_NUMBERS * element_bytes_of(run)][::num_states]
    numbers = large / element_bytes_of(run)
    return _with_costs(run, step_range, numbers, num_states, is_fused=is_fused)


def updates_in_backward_pass(run: OptimizerProfile, step_range: OptimizerRange, *, is_fused: bool) -> OffloadedUpdates:
    """In the last backward pass before the step, run again, each as its gradient is complete."""
    gradients = run.gradients(step_range)
    gradients = gradients[np.argsort(run.allocated_at[gradients], kind="stable")]
    numbers = run.tape.storages.num_bytes[gradients] / element_bytes_of(run)
    found = _with_costs(run, step_range, numbers, _num_states(run, step_range), is_fused=is_fused)
    begin, end = [each for each in runs_of(run.tape.operators.phase == Phase.BACKWARD) if each[0] < step_range.begin][
        -1
    ]
    reached = run.tape.events.operator[np.minimum(moments_of_updates(run, gradients), len(run.tape.events) - 1)]
    reached = np.clip(reached, begin, end)
    done = np.append(0.0, np.cumsum(run.operator_seconds[begin:end]))
    before = np.diff(done[reached - begin], prepend=0.0)
    return OffloadedUpdates(
        updates=tuple(
            dataclasses.replace(update, seconds_before=max(0.0, seconds))
            for update, seconds in zip(found.updates, before.tolist(), strict=True)
        ),
        issue_seconds=found.issue_seconds
        + efficiency_of(run.device).issue_seconds * int(run.is_kernel[begin:end].sum()),
        seconds_after=float(done[-1] - done[reached[-1] - begin]) if len(reached) else float(done[-1]),
    )


def _num_states(run: OptimizerProfile, step_range: OptimizerRange) -> int:
    """How many states as large as itself each parameter has."""
    sizes = run.tape.storages.num_bytes
    least = MIN_NUMBERS * element_bytes_of(run)
    states, gradients = sizes[run.state(step_range)], sizes[run.gradients(step_range)]
    return max(1, round(int((states >= least).sum()) / max(1, int((gradients >= least).sum()))))


def _with_costs(
    run: OptimizerProfile, step_range: OptimizerRange, numbers: Column, num_states: int, *, is_fused: bool
) -> OffloadedUpdates:
    size, efficiency = element_bytes_of(run), efficiency_of(run.device)
    gradients = run.gradients(step_range)
    num_tensors = len(gradients)
    all_numbers = float(run.tape.storages.num_bytes[gradients].sum()) / size
    if is_fused or implementation_of(run) == "fused":
        num_kernels = _FUSED_KERNELS * num_tensors
        num_bytes = size * all_numbers * (3 + 2 * num_states)
        traffic = num_bytes / (run.device.dram_bytes_per_second * efficiency.of_bandwidth["optimizer"])
    else:
        here = slice(step_range.begin, step_range.end)
        num_kernels = sum(num_tensors if "_foreach_" in name else 1 for name in run.names(step_range))
        traffic = float(run.operator_seconds[here].sum()) - int(run.is_kernel[here].sum()) * efficiency.launch_seconds
    launch = efficiency.launch_seconds * num_kernels / max(1, num_tensors)
    is_large = numbers >= MIN_NUMBERS
    results = num_results(run, step_range, is_fused=is_fused)
    updates = [
        StreamedUpdate(
            state_bytes=round(num_states * size * count) if large else 0,
            num_copies=num_states if large else 0,
            seconds=launch + max(0.0, traffic) * count / max(1.0, all_numbers),
            result_bytes=round(results * size * count),
        )
        for count, large in zip(numbers.tolist(), is_large.tolist(), strict=True)
    ]
    num_copies = 2 * num_states * int(is_large.sum())
    return OffloadedUpdates(
        updates=(*updates, *_the_rest(updates, num_tensors, launch, traffic, numbers, all_numbers)),
        issue_seconds=efficiency.issue_seconds * (num_kernels + num_copies)
        + HostWork.OFFLOADED_PARAMETER.value * int(is_large.sum()),
    )


def _the_rest(
    updates: Sequence[StreamedUpdate],
    num_tensors: int,
    launch: float,
    traffic: float,
    numbers: Column,
    all_numbers: float,
) -> list[StreamedUpdate]:
    """The parameters whose states stay on the card, as one update after the others."""
    num_left, numbers_left = num_tensors - len(updates), all_numbers - float(numbers.sum())
    if num_left <= 0:
        return []
    seconds = launch * num_left + max(0.0, traffic) * max(0.0, numbers_left) / max(1.0, all_numbers)
    return [StreamedUpdate(state_bytes=0, num_copies=0, seconds=seconds)]
