"""What optimizer updates in the backward pass save and cost on a tape: gradients freed early, states allocated early, and obstacles.

Numbers only; `tightfit.techniques.optimizer.updates.backward_updates` applies it.
"""

import numpy as np

from tightfit.analysis.gradient_readers import num_backwards_per_update, readers_of_gradients, scales_loss
from tightfit.analysis.intervals import changes, memory_timeline, runs_of
from tightfit.analysis.optimizer import OptimizerProfile, events_of, sides_of_update
from tightfit.cost.host_python import HostWork
from tightfit.planner.option import Change, RetainedPass
from tightfit.planner.sides import Sides
from tightfit.tape import Category, Column, EventKind, Phase

# The operators of `torch.nn.utils.clip_grad_norm_`, in its foreach and its for-loop implementation.
_NORMS = frozenset({"_foreach_norm", "linalg_vector_norm", "norm"})
_SCALING = frozenset({"_foreach_mul_", "mul_"})
# A norm and a sum of each gradient.
_KERNELS_PER_COMPARISON = 2
BACKWARD_SLOT = "gradients"
"""The slot of techniques that consume gradients during backward; only one can, and micro-batches need all gradients at its end."""


def obstacle(run: OptimizerProfile) -> str:
    """Why updates in backward are not possible, as far as a tape shows; empty where they are."""
    if scales_loss(run):
        return "a GradScaler looks at all of them before it lets the optimizer step; bfloat16 needs none"
    if num_backwards_per_update(run) > 1:
        return f"they are accumulated over {num_backwards_per_update(run)} backward passes; a larger batch that is split otherwise needs none"
    looks = readers_of_gradients(run)
    # Clipping by norm can be reproduced, since the norm is known after the first of two passes; any other reader of the gradients
    # would find them freed.
    if looks and not (looks & _NORMS and looks <= _NORMS | _SCALING):
        return f"the script reads them before the optimizer steps ({', '.join(sorted(looks))})"
    return ""


def sides_of_second_pass(run: OptimizerProfile) -> Sides:
    """Seconds per step of running the backward passes once more, and of the Python of each update there."""
    passes = runs_of(run.tape.operators.phase == Phase.BACKWARD)
    again = sum((run.sides_of(begin, end) for begin, end in passes), Sides()) * (1 / run.num_steps)
    return again + sides_of_updates_in_backward(run)


def sides_of_updates_in_backward(run: OptimizerProfile) -> Sides:
    """What updates within a second backward pass take per step besides the two: the sums by which each gradient is compared, and Python."""
    found = Sides()
    for step_range in run.steady:
        gradients = run.gradients(step_range)
        num_bytes = _KERNELS_PER_COMPARISON * int(run.block_bytes[gradients].sum())
        found += sides_of_update(run, num_bytes, _KERNELS_PER_COMPARISON * len(gradients))
        found += Sides(on_host=HostWork.UPDATED_PARAMETER.value * len(gradients))
    return found


def gradients_used_up(run: OptimizerProfile) -> tuple[Change, ...]:
    """Each gradient is freed when the next but one is allocated, and the optimizer step has no temporaries."""
    found: list[Change] = []
    seen: set[int] = set()
    for step_range in run.step_ranges:
        gradients = run.gradients(step_range)
        gradients = gradients[np.argsort(run.allocated_at[gradients])]
        used = np.r_[run.allocated_at[gradients][2:], [step_range.begin_event] * 2][: len(gradients)]
        # With several optimizers (GAN) a gradient can be allocated at the steps of both but is freed once only.
        fresh = np.array([g not in seen for g in gradients.tolist()], dtype=bool)
        seen.update(gradients.tolist())
        found += changes(
            memory_timeline(used[fresh], run.freed_at[gradients][fresh], run.block_bytes[gradients][fresh]), -1.0
        )
        found += changes(run.held(step_range), -1.0)
    return tuple(change for change in found if change.end > change.begin)


def states_come_early(run: OptimizerProfile, fraction: float = 1.0) -> tuple[Change, ...]:
    """In the first step a parameter's states are allocated when its gradient is complete; `fraction` scales their bytes."""
    step_range = run.step_ranges[0]
    gradients, state = run.gradients(step_range), run.state(step_range)
    state = state[run.allocated_at[state] >= step_range.begin_event]
    total, gradient_bytes = int(run.block_bytes[state].sum()), run.block_bytes[gradients]
    if not total or not gradient_bytes.sum():
        return ()
    share = gradient_bytes * (total / int(gradient_bytes.sum()))
    until_step = np.full(len(gradients), step_range.begin_event)
    early = memory_timeline(run.allocated_at[gradients], until_step, share.astype(np.int64))
    allocated_at, end = run.allocated_at[state], int(run.allocated_at[state].max())
    late = memory_timeline(
        np.full(len(state), step_range.begin_event), np.minimum(allocated_at, end), run.block_bytes[state]
    )
    return (*changes(early, fraction), *changes(late, fraction))


def retained_passes(run: OptimizerProfile) -> tuple[RetainedPass, ...]:
    """The backward passes whose graph is retained while they run for the first time."""
    passes = events_of(run, runs_of(run.tape.operators.phase == Phase.BACKWARD))
    activation = run.tape.storages.category == Category.ACTIVATIONS
    found = []
    for begin, end in passes:
        freed = np.flatnonzero(activation & (run.allocated_at < begin) & (run.freed_at > begin) & (run.freed_at < end))
        freed = freed[np.argsort(run.freed_at[freed], kind="stable")]
        sizes = np.cumsum(run.block_bytes[freed])
        found.append(
            RetainedPass(
                begin=int(begin),
                end=int(end),
                freed_at=tuple(run.freed_at[freed].tolist()),
                freed_bytes=tuple(sizes.tolist()),
            )
        )
    return tuple(found)


def waiting_for_second_pass(run: OptimizerProfile) -> tuple[Change, ...]:
    """The first of two backward passes retains the graph, so activations that it would free stay allocated until its end."""
    found: list[Change] = []
    for each in retained_passes(run):
        sizes = np.diff(each.freed_bytes, prepend=0)
        freed_at = np.array(each.freed_at, dtype=np.int64)
        found += changes(memory_timeline(freed_at, np.full(len(freed_at), each.end), sizes))
    return tuple(found)


def moments_of_updates(run: OptimizerProfile, gradients: Column) -> Column:
    """The event after which each gradient's parameter is updated: the last event before the next allocation, as frees in between are done."""
    allocations = np.flatnonzero(run.tape.events.kind == EventKind.ALLOCATE)
    after = np.searchsorted(allocations, run.allocated_at[gradients], side="right")
    return np.r_[allocations, len(run.tape.events)][after] - 1


def either(first: tuple[Change, ...], second: tuple[Change, ...]) -> tuple[Change, ...]:
    """The larger of two sets of changes at every event: two passes over the same events need the maximum of both."""
    borders = np.unique([border for change in (*first, *second) for border in (change.begin, change.end)])
    most = np.maximum(*(_at(borders, each) for each in (first, second)))
    found = zip(borders[:-1].tolist(), borders[1:].tolist(), most[:-1].tolist(), strict=True)
    return tuple(Change(begin=begin, end=end, num_bytes=num_bytes) for begin, end, num_bytes in found if num_bytes)


def _at(borders: Column, changed: tuple[Change, ...]) -> Column:
    steps = np.zeros(len(borders), dtype=np.int64)
    for change in changed:
        steps[np.searchsorted(borders, [change.begin, change.end])] += (change.num_bytes, -change.num_bytes)
    return np.cumsum(steps)
