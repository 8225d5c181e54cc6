"""What smaller states are worth on a tape, as the options of the techniques that keep them say it."""

import numpy as np

from tightfit.planner.option import Change
from tightfit.tape import Column
from tightfit.techniques.optimizer_tape import OptimizerTape, changes

# float32 tensors of one parameter's size that the codes of a state are made in, one after the other.
_NUM_COPIES_TO_ENCODE = 3
_MIN_NUMBERS = 4096


def state_changes(run: OptimizerTape, bytes_kept: float, *, part: float = 1.0) -> tuple[Change, ...]:
    """States shrink to `bytes_kept` per number, but for small ones; `part` of them is eligible.

    While the largest parameter is updated, its states are whole, and more is held in float32 to make them small again.
    """
    fraction_kept = min(1.0, bytes_kept / run.bytes_per_number)
    found: list[Change] = []
    storages = run.tape.storages
    first = run.stretches[0]
    states = run.state(run.stretches[-1])
    large = _large(run, states)
    kept_whole = np.maximum(run.born[large], first.begin_event)
    stretches = [
        (int(begin), int(end), int(size))
        for begin, end, size in zip(kept_whole, run.died[large], storages.num_bytes[large], strict=True)
    ]
    found += changes(stretches, -part * (1.0 - fraction_kept))
    for stretch in run.stretches:
        found += changes(run.held(stretch), -1.0)
        gradients = run.gradients(stretch)
        largest = int(run.block_bytes[gradients].max(initial=0))
        num_states = round(int(run.block_bytes[states].sum()) / max(1, int(run.block_bytes[gradients].sum())))
        temporary = (num_states * part + _NUM_COPIES_TO_ENCODE * 4 / run.bytes_per_number) * largest
        found.append(Change(begin=stretch.begin_event, end=stretch.end_event, num_bytes=round(temporary)))
    return tuple(change for change in found if change.end > change.begin)


def state_seconds(run: OptimizerTape, *, bytes_per_number: int, kernels_per_state: int) -> float:
    """Seconds per step that are added: the updates one by one, and for each number of each state some bytes of traffic."""
    total = 0.0
    for stretch in run.steady:
        gradients, states = run.gradients(stretch), _large(run, run.state(stretch))
        kernels = sum(len(gradients) if "_foreach_" in name else 1 for name in run.names(stretch))
        num_numbers = int(run.block_bytes[states].sum()) // run.bytes_per_number
        coding = run.seconds_of_update(bytes_per_number * num_numbers, kernels_per_state * len(states))
        total += run.seconds_of_kernels(stretch, kernels) + coding
    return total - run.seconds


def _large(run: OptimizerTape, states: Column) -> Column:
    return states[run.block_bytes[states] >= _MIN_NUMBERS * run.bytes_per_number]
