"""What stands between a backward pass and the optimizer's step: accumulation, readers of the gradients, a scaled loss, updates within the pass."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from tightfit.analysis.intervals import runs_of
from tightfit.analysis.optimizer import OptimizerProfile
from tightfit.analysis.optimizer_algorithm import LOW_PRECISION
from tightfit.tape import Column, Phase

# A lookup of the gradients between backward pass and optimizer reads about all of them; a loss that is printed reads next to nothing.
_FRACTION_THAT_IS_A_LOOK = 0.3


def updates_in_backward(run: OptimizerProfile) -> bool:
    """Whether updates run within a backward pass: it goes on after one, or a step finds no gradient. Then there is no step to change."""
    if not all(len(run.gradients(stretch)) for stretch in run.stretches):
        return True
    phases = run.tape.operators.phase
    matters = np.flatnonzero(np.isin(phases, (Phase.FORWARD, Phase.BACKWARD)))
    following = np.searchsorted(matters, [stretch.end for stretch in run.stretches])
    return bool((phases[matters[following[following < len(matters)]]] == Phase.BACKWARD).any())


def num_backwards_per_update(run: OptimizerProfile) -> int:
    """The most backward passes that come before one run of the optimizer."""
    phases = run.tape.operators.phase
    passes = [end for _, end in runs_of(_joined(phases) == Phase.BACKWARD)]
    most, before = 0, 0
    for stretch in run.stretches:
        most = max(most, sum(before < end <= stretch.begin for end in passes))
        before = stretch.end
    return most


def readers_of_gradients(run: OptimizerProfile) -> frozenset[str]:
    """What reads the gradients between backward pass and optimizer, without namespace and overload; nothing reads as much there."""
    operators = run.tape.operators
    found: set[str] = set()
    for stretch in run.stretches:
        backward = np.flatnonzero(operators.phase[: stretch.begin] == Phase.BACKWARD)
        begin = int(backward[-1]) + 1 if len(backward) else stretch.begin
        held = int(run.block_bytes[run.gradients(stretch)].sum())
        read: Counter[str] = Counter()
        for name, num_bytes in zip(
            operators.name[begin : stretch.begin].tolist(),
            operators.bytes_read[begin : stretch.begin].tolist(),
            strict=True,
        ):
            read[run.tape.strings[name].split(".")[1]] += num_bytes
        found.update(name for name, num_bytes in read.items() if num_bytes > _FRACTION_THAT_IS_A_LOOK * held > 0)
    return frozenset(found)


def scales_loss(run: OptimizerProfile) -> bool:
    """Whether a `GradScaler` is at work."""
    return any("_amp_" in run.tape.strings[n] for n in np.unique(run.tape.operators.name).tolist())


def fraction_in_low_precision(run: OptimizerProfile) -> float:
    """The part of all FLOPs that is done in 16 bits."""
    operators = run.tape.operators
    low = np.isin(operators.dtype, [i for i, text in enumerate(run.tape.strings) if text in LOW_PRECISION])
    total = float(operators.flops.sum())
    return float(operators.flops[low].sum()) / total if total else 0.0


def _joined(phases: Column) -> Column:
    """Phases with what happens aside (OTHER) left out of backward passes that it interrupts: no forward pass or optimizer comes between."""
    known: Sequence[int] = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
    matters = np.isin(phases, known)
    if not matters.any():
        return phases
    last = np.maximum.accumulate(np.where(matters, np.arange(len(phases)), -1))
    return np.where(last >= 0, phases[np.maximum(last, 0)], phases)
