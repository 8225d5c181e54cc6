"""Freezing: the first blocks of a stack, and the modules before them, are not trained.

Their gradients and states are gone, and the backward pass ends at the first trained block, so nothing before it is saved for backward. The effect
on the trained model cannot be predicted: it is lossy, and only used if it is allowed. Lee, Tang and Lin, "What would Elsa do? Freezing layers
during transformer fine-tuning" (arXiv:1911.03090) keep 90 % of the quality with a quarter of the layers trained.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, final

import numpy as np

from tightfit.analysis.intervals import changes, memory_timeline
from tightfit.analysis.modules import ModuleCall
from tightfit.analysis.profile import Profile
from tightfit.analysis.trained_parts import NumberedModules, TrainedParts
from tightfit.planner.option import Change, Option, merged
from tightfit.planner.suggestion import Suggestion
from tightfit.tape import Category, Phase
from tightfit.techniques.technique import AbstractTechnique, ChosenOption
from tightfit.units import format_bytes, format_seconds_change

if TYPE_CHECKING:
    from tightfit.techniques.session import Session

PARTS = (1, 2, 3)
"""Quarters of the blocks."""


@final
class Freezing(AbstractTechnique):
    """Trades the training of the first blocks for their gradients, states and activations, and for their backward pass."""

    name = "freezing"
    exact = False
    exactness = "lossy: the first blocks keep their weights"
    tolerance = 0.2
    is_alike_in_batches = True

    def options(self, profile: Profile) -> Iterable[Option]:
        """A quarter, a half and three quarters of the blocks.

        The time saved is not counted, or a plan would freeze as much as it may. Options with fewer frozen blocks are tried first.
        """
        parts = profile.optimizer.trained_parts
        blocks = parts.blocks
        if not parts.run.step_ranges or blocks is None or not len(parts.gradients):
            return
        for number in _numbers(parts, blocks):
            yield Option(
                technique=self.name,
                where=blocks.path,
                settings={"num_blocks": number, "before": ",".join(blocks.before)},
                changes=_changes(parts, blocks, number),
                seconds=number * 1e-9,
                exact=False,
                slots=frozenset({"trained"}),
                needs_new_trace=True,
            )

    def advice(self, profile: Profile) -> Iterable[Suggestion]:
        """The peak and the time saved for each number of frozen blocks."""
        parts = profile.optimizer.trained_parts
        blocks = parts.blocks
        if not parts.run.step_ranges or blocks is None or not len(parts.gradients):
            return []
        seconds = profile.costs.seconds
        numbers = _numbers(parts, blocks)
        if not numbers:
            return []
        peak_bytes = parts.peak_with(())
        left_bytes = {number: parts.peak_with(_changes(parts, blocks, number)) for number in numbers}
        held = [
            f"{format_bytes(num_bytes)} with {number} of {blocks.number} "
            f"({format_seconds_change(-_saved_seconds(parts, blocks, number, seconds))} per step)"
            for number, num_bytes in left_bytes.items()
        ]
        return [
            Suggestion(
                what=f"freezing the first blocks of {blocks.path} (and the modules that run before them)",
                changes="model",
                saves_bytes=peak_bytes - min(left_bytes.values(), default=peak_bytes),
                effect=f"would reduce allocated memory from {format_bytes(peak_bytes)} to {', '.join(held)}",
                note="changes results: --allow freezing",
            )
        ]

    def apply(self, session: "Session", chosen: Sequence[ChosenOption]) -> None:
        """Takes the parameters out of the graph; an optimizer skips parameters without a gradient."""
        from tightfit.techniques.trained.apply_freezing import apply_freezing

        apply_freezing(session, chosen)


def _numbers(parts: TrainedParts, blocks: NumberedModules) -> list[int]:
    """How many blocks may be frozen, each leaving something to train."""
    trained = set(parts.modules_of(parts.gradients))
    numbers = sorted({max(1, blocks.number * part // 4) for part in PARTS})
    return [number for number in numbers if trained - _frozen_names(parts, blocks, number)]


def _frozen_names(parts: TrainedParts, blocks: NumberedModules, number: int) -> frozenset[str]:
    """The paths of all modules that would be frozen, as on operators; modules that contain the blocks also run after them."""
    inside = [name for i in range(number) for name in parts.module_calls.modules_inside(f"{blocks.path}.{i}")]
    return frozenset((*inside, *(name for name in blocks.before if not f"{blocks.path}.".startswith(f"{name}."))))


def _changes(parts: TrainedParts, blocks: NumberedModules, number: int) -> tuple[Change, ...]:
    frozen = _frozen_names(parts, blocks, number)
    gradients = np.array([name in frozen for name in parts.modules_of(parts.gradients)], dtype=bool)
    return merged((*parts.untrained(gradients), *_no_graph(parts, blocks, number, frozen)))


def _no_graph(parts: TrainedParts, blocks: NumberedModules, number: int, frozen: frozenset[str]) -> tuple[Change, ...]:
    """Without a backward pass of the frozen blocks nothing is saved for it, and it has no temporaries."""
    run, tape, module_calls = parts.run, parts.tape, parts.module_calls
    is_frozen = np.array([text in frozen for text in tape.strings], dtype=bool)[tape.operators.module]
    allocated_at = tape.storages.operator
    by_operator = allocated_at >= 0
    inside = np.zeros(len(allocated_at), dtype=bool)
    inside[by_operator] = is_frozen[allocated_at[by_operator]]
    phase = np.where(by_operator, tape.operators.phase[allocated_at], Phase.OTHER)
    saved = inside & module_calls.saved_for_backward
    begin = run.allocated_at.copy()
    for calls in (module_calls.calls(f"{blocks.path}.{i}") for i in range(number)):
        for call in calls:
            _until_left(begin, call)
    saved &= begin < run.freed_at
    gone = np.flatnonzero(saved)
    temporary = inside & (phase == Phase.BACKWARD) & (tape.storages.category == Category.TEMPORARIES)
    temporary = np.flatnonzero(temporary)
    return (
        *changes(memory_timeline(begin[gone], run.freed_at[gone], run.block_bytes[gone]), -1.0),
        *changes(
            memory_timeline(run.allocated_at[temporary], run.freed_at[temporary], run.block_bytes[temporary]), -1.0
        ),
    )


def _until_left(begin: np.ndarray, call: ModuleCall) -> None:
    """A block's intermediate results are freed when the block ends, and its output after about as long again, once it is read."""
    begin[call.saved] = call.end_event
    if call.output >= 0:
        begin[call.output] = call.end_event + (call.end_event - call.begin_event)


def _saved_seconds(parts: TrainedParts, blocks: NumberedModules, number: int, seconds: np.ndarray) -> float:
    """The time of the frozen modules' backward pass, per step."""
    frozen = _frozen_names(parts, blocks, number)
    operators = parts.tape.operators
    is_frozen = np.array([text in frozen for text in parts.tape.strings], dtype=bool)[operators.module]
    return float(seconds[is_frozen & (operators.phase == Phase.BACKWARD)].sum()) / parts.run.num_steps
