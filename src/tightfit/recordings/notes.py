"""From the notes of a recorded run to marks: the events of each step, and the module of each allocation.

The categories of blocks are determined in `tightfit.recordings.classify`.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tightfit.runtime.recorded import BACKWARD, BY_OPTIMIZER, BY_USER, OPTIMIZER, OTHER, Held, Note
from tightfit.simulate.history import HistorySpan
from tightfit.tape import Column
from tightfit.tape.step_ends import ends_of_run


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlacedNote:
    """A note, the index of the event that follows it, and the addresses in the trace that it names."""

    note: Note
    event: int
    held: Held


def steps_of(notes: Sequence[PlacedNote], num_events: int, *, was_cut_short: bool) -> tuple[HistorySpan, ...]:
    """The spans of the run. A step ends where the user calls `step`, or else where an optimizer stepped, or else with each backward pass.

    The first begins with the first forward or backward pass. A pass after the last is a step of its own where the run was cut short.
    """
    # From the most to the least certain; calls of step() by the user decide alone, even where optimizers step more often.
    ends = _ends_by_user(notes) or _ends_by_optimizers(notes) or _backward_ends(notes)
    begins = [n.event for n in notes if n.note.kind == "phase" and n.note.text not in (OTHER, OPTIMIZER)]
    if was_cut_short and num_events and begins and begins[-1] >= (ends[-1] if ends else 0):
        ends = [*ends, num_events]
    if not ends:
        return (HistorySpan(name="set-up", kind="setup", begin=0, end=num_events),) if num_events else ()
    first = begins[0] if begins and begins[0] < ends[0] else 0
    spans = [HistorySpan(name="set-up", kind="setup", begin=0, end=first)] if first else []
    for number, (begin, end) in enumerate(zip([first, *ends], ends, strict=False), start=1):
        spans.append(HistorySpan(name=f"step {number}", kind="step", begin=begin, end=end))
    if num_events > ends[-1]:
        spans.append(HistorySpan(name="after the last step", kind="aside", begin=ends[-1], end=num_events))
    return tuple(spans)


def _ends_by_user(notes: Sequence[PlacedNote]) -> list[int]:
    return [n.event for n in notes if n.note.kind == "step" and n.note.text == BY_USER]


def _ends_by_optimizers(notes: Sequence[PlacedNote]) -> list[int]:
    steps = [n for n in notes if n.note.kind == "step" and n.note.text.startswith(BY_OPTIMIZER)]
    return [steps[position].event for position in ends_of_run([n.note.text for n in steps])]


def _backward_ends(notes: Sequence[PlacedNote]) -> list[int]:
    phases = [n for n in notes if n.note.kind == "phase"]
    return [after.event for before, after in itertools.pairwise(phases) if before.note.text == BACKWARD]


def modules_of(trace: Sequence[Mapping[str, Any]], notes: Sequence[PlacedNote]) -> tuple[Column, Column, list[str]]:
    """The events of allocations inside modules, the index of the module of each, and the modules."""
    inside = [n for n in notes if n.note.kind == "module"]
    at = [n.event for n in inside]
    names: dict[str, int] = {}
    events, values = [], []
    for event, entry in enumerate(trace):
        # Module notes mark changes of the innermost module, so the last one before an allocation names its module.
        last = bisect.bisect_right(at, event) - 1 if entry["action"] == "alloc" else -1
        if last >= 0 and inside[last].note.text:
            events.append(event)
            values.append(names.setdefault(inside[last].note.text, len(names)))
    return np.array(events, dtype=np.int64), np.array(values, dtype=np.int64), list(names)
