"""What updates within the backward pass are worth on a tape: which gradients are gone, when states are made, and what stands against it.

Numbers only; `tightfit.techniques.optimizer.backward_updates` does it.
"""

import numpy as np

from tightfit.analysis.gradient_readers import num_backwards_per_update, readers_of_gradients, scales_loss
from tightfit.analysis.intervals import changes, levels, runs_of
from tightfit.analysis.optimizer import OptimizerProfile, events_of
from tightfit.planner.option import Change
from tightfit.tape import Category, Column, EventKind, Phase

# What `torch.nn.utils.clip_grad_norm_` does, in both of its implementations.
_NORMS = frozenset({"_foreach_norm", "linalg_vector_norm", "norm"})
_SCALING = frozenset({"_foreach_mul_", "mul_"})
BACKWARD_SLOT = "gradients"
"""What takes over the gradients of a backward pass, of which there can be one: micro-batches have made all of them before it."""


def obstacle(run: OptimizerProfile) -> str:
    """Why it cannot be done, as far as a tape shows; empty where it can."""
    if scales_loss(run):
        return "a GradScaler looks at all of them before it lets the optimizer step; bfloat16 needs none"
    if num_backwards_per_update(run) > 1:
        return f"they are accumulated over {num_backwards_per_update(run)} backward passes; a larger batch that is split otherwise needs none"
    looks = readers_of_gradients(run)
    if looks and not (looks & _NORMS and looks <= _NORMS | _SCALING):
        return f"the script reads them before the optimizer steps ({', '.join(sorted(looks))})"
    return ""


def seconds_of_second_pass(run: OptimizerProfile) -> float:
    """What a backward pass takes that runs once more, per step of the loop."""
    stretches = runs_of(run.tape.operators.phase == Phase.BACKWARD)
    return sum(run.seconds_of(begin, end) for begin, end in stretches) / run.num_steps


def gradients_used_up(run: OptimizerProfile) -> tuple[Change, ...]:
    """Gradients die once the next but one is there, and the optimizer's step holds nothing."""
    found: list[Change] = []
    seen: set[int] = set()
    for stretch in run.stretches:
        gradients = run.gradients(stretch)
        gradients = gradients[np.argsort(run.born[gradients])]
        used = np.r_[run.born[gradients][2:], [stretch.begin_event] * 2][: len(gradients)]
        fresh = np.array([g not in seen for g in gradients.tolist()], dtype=bool)
        seen.update(gradients.tolist())
        found += changes(levels(used[fresh], run.died[gradients][fresh], run.block_bytes[gradients][fresh]), -1.0)
        found += changes(run.held(stretch), -1.0)
    return tuple(change for change in found if change.end > change.begin)


def states_come_early(run: OptimizerProfile, fraction: float = 1.0) -> tuple[Change, ...]:
    """In the first step a parameter's states are made when its gradient is there; `fraction` of their bytes is left of them."""
    stretch = run.stretches[0]
    gradients, state = run.gradients(stretch), run.state(stretch)
    state = state[run.born[state] >= stretch.begin_event]
    total, gradient_bytes = int(run.block_bytes[state].sum()), run.block_bytes[gradients]
    if not total or not gradient_bytes.sum():
        return ()
    share = gradient_bytes * (total / int(gradient_bytes.sum()))
    until_step = np.full(len(gradients), stretch.begin_event)
    early = levels(run.born[gradients], until_step, share.astype(np.int64))
    born, end = run.born[state], int(run.born[state].max())
    late = levels(np.full(len(state), stretch.begin_event), np.minimum(born, end), run.block_bytes[state])
    return (*changes(early, fraction), *changes(late, fraction))


def waiting_for_second_pass(run: OptimizerProfile) -> tuple[Change, ...]:
    """What the backward pass frees as it goes is still needed by the second one while the first one runs."""
    passes = events_of(run, runs_of(run.tape.operators.phase == Phase.BACKWARD))
    activation = run.tape.storages.category == Category.ACTIVATIONS
    found: list[Change] = []
    for begin, end in passes:
        freed = np.flatnonzero(activation & (run.born < begin) & (run.died > begin) & (run.died < end))
        found += changes(levels(run.died[freed], np.full(len(freed), end), run.block_bytes[freed]))
    return tuple(found)


def moments_of_updates(run: OptimizerProfile, gradients: Column) -> Column:
    """The event after which each gradient's parameter is updated: all that follows its birth up to the next one is freed by then."""
    births = np.flatnonzero(run.tape.events.kind == EventKind.ALLOCATE)
    after = np.searchsorted(births, run.born[gradients], side="right")
    return np.r_[births, len(run.tape.events)][after] - 1


def either(first: tuple[Change, ...], second: tuple[Change, ...]) -> tuple[Change, ...]:
    """Wherever the larger of both: what is held in one of two passes over the same events, whichever holds more."""
    borders = np.unique([border for change in (*first, *second) for border in (change.begin, change.end)])
    most = np.maximum(*(_at(borders, each) for each in (first, second)))
    found = zip(borders[:-1].tolist(), borders[1:].tolist(), most[:-1].tolist(), strict=True)
    return tuple(Change(begin=begin, end=end, num_bytes=num_bytes) for begin, end, num_bytes in found if num_bytes)


def _at(borders: Column, changed: tuple[Change, ...]) -> Column:
    steps = np.zeros(len(borders), dtype=np.int64)
    for change in changed:
        steps[np.searchsorted(borders, [change.begin, change.end])] += (change.num_bytes, -change.num_bytes)
    return np.cumsum(steps)
