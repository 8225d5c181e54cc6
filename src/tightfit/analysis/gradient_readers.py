"""What happens between a backward pass and the optimizer step: accumulation, readers of the gradients, loss scaling, updates in backward."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from tightfit.analysis.intervals import runs_of
from tightfit.analysis.optimizer import OptimizerProfile, events_of
from tightfit.analysis.optimizer_algorithm import LOW_PRECISION
from tightfit.tape import Category, Column, Phase

# Clipping or logging gradient norms between backward and step reads about all gradients; printing a loss reads next to nothing.
_FRACTION_THAT_IS_A_LOOK = 0.3


def updates_in_backward(run: OptimizerProfile) -> bool:
    """Whether updates run within a backward pass: it continues after one, or a step finds no gradient. Then there is no step to change."""
    if not all(len(run.gradients(step_range)) for step_range in run.step_ranges):
        return True
    phases = run.tape.operators.phase
    matters = np.flatnonzero(np.isin(phases, (Phase.FORWARD, Phase.BACKWARD)))
    following = np.searchsorted(matters, [step_range.end for step_range in run.step_ranges])
    return bool((phases[matters[following[following < len(matters)]]] == Phase.BACKWARD).any())


def num_backwards_per_update(run: OptimizerProfile) -> int:
    """The largest number of backward passes before one optimizer step, without those whose gradients are gone by then (a second model's, updated by hand)."""
    phases = run.tape.operators.phase
    passes = runs_of(_joined(phases) == Phase.BACKWARD)
    events = events_of(run, passes)
    most, before = 0, 0
    for step_range in run.step_ranges:
        between = [
            within
            for (_, end), within in zip(passes, events, strict=True)
            if before < end <= step_range.begin and not _is_used_before(run, within, step_range.begin_event)
        ]
        most = max(most, len(between))
        before = step_range.end
    return most


def _is_used_before(run: OptimizerProfile, within: tuple[int, int], event: int) -> bool:
    """Whether a backward pass has allocated gradients, and all of them are freed when an optimizer's step begins."""
    begin, end = within
    made = (run.tape.storages.category == Category.GRADIENTS) & (run.allocated_at >= begin) & (run.allocated_at < end)
    return bool(made.any() and (run.freed_at[made] < event).all())


def readers_of_gradients(run: OptimizerProfile) -> frozenset[str]:
    """The operators that read most of the gradients between backward pass and optimizer step, without namespace and overload."""
    operators = run.tape.operators
    found: set[str] = set()
    for step_range in run.step_ranges:
        backward = np.flatnonzero(operators.phase[: step_range.begin] == Phase.BACKWARD)
        # After the last backward operator: what reads gradients earlier, such as a hook, is part of the backward pass.
        begin = int(backward[-1]) + 1 if len(backward) else step_range.begin
        held = int(run.block_bytes[run.gradients(step_range)].sum())
        read: Counter[str] = Counter()
        for name, num_bytes in zip(
            operators.name[begin : step_range.begin].tolist(),
            operators.bytes_read[begin : step_range.begin].tolist(),
            strict=True,
        ):
            read[run.tape.strings[name].split(".")[1]] += num_bytes
        found.update(name for name, num_bytes in read.items() if num_bytes > _FRACTION_THAT_IS_A_LOOK * held > 0)
    return frozenset(found)


def scales_loss(run: OptimizerProfile) -> bool:
    """Whether the run uses a `GradScaler`."""
    # GradScaler.unscale_ calls _amp_foreach_non_finite_check_and_unscale_, and update() _amp_update_scale_.
    return any("_amp_" in run.tape.strings[n] for n in np.unique(run.tape.operators.name).tolist())


def fraction_in_low_precision(run: OptimizerProfile) -> float:
    """The share of all FLOPs that is computed in 16 bits."""
    operators = run.tape.operators
    low = np.isin(operators.dtype, [i for i, text in enumerate(run.tape.strings) if text in LOW_PRECISION])
    total = float(operators.flops.sum())
    return float(operators.flops[low].sum()) / total if total else 0.0


def _joined(phases: Column) -> Column:
    """The phases with OTHER replaced by the phase before it, so that a hook or a callback inside of a backward pass does not split it."""
    known: Sequence[int] = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
    matters = np.isin(phases, known)
    if not matters.any():
        return phases
    last = np.maximum.accumulate(np.where(matters, np.arange(len(phases)), -1))
    return np.where(last >= 0, phases[np.maximum(last, 0)], phases)
