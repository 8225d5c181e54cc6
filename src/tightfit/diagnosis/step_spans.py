"""The memory timeline of a history by step: peaks, bytes still allocated at the end, and the peak without some blocks."""

import dataclasses

import numpy as np

from tightfit.simulate.history import History
from tightfit.tape import Column

NO_STEP = -1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepSpan:
    """One span with all its pieces: from the begin of the first to the end of the last."""

    name: str
    kind: str
    begin: int
    end: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    end_allocated_bytes: int


def steps_of(history: History, *, kinds: tuple[str, ...] = ("setup", "step", "aside")) -> tuple[StepSpan, ...]:
    """The spans of a history in order of first appearance, pieces of one name merged, without empty ones."""
    # A step that an evaluation interrupts is two spans of one name.
    pieces: dict[tuple[str, str], list[slice]] = {}
    for span in history.spans:
        if span.begin < span.end and span.kind in kinds:
            pieces.setdefault((span.name, span.kind), []).append(slice(span.begin, span.end))
    return tuple(
        StepSpan(
            name=name,
            kind=kind,
            begin=slices[0].start,
            end=slices[-1].stop,
            peak_allocated_bytes=max(int(history.allocated[s].max()) for s in slices),
            peak_reserved_bytes=max(int(history.reserved[s].max()) for s in slices),
            end_allocated_bytes=int(history.allocated[slices[-1].stop - 1]),
        )
        for (name, kind), slices in pieces.items()
    )


def step_numbers(history: History, steps: tuple[StepSpan, ...]) -> Column:
    """For each event the index of its step, `NO_STEP` outside; of nested ones the later."""
    numbers = np.full(history.num_events, NO_STEP, dtype=np.int64)
    for number, step in enumerate(steps):
        # In the order of begins, so that a nested span overwrites the one around it.
        numbers[step.begin : step.end] = number
    return numbers


def saved_bytes(history: History, num_bytes: Column, begin: Column, end: Column, *, kept_bytes: int = 0) -> int:
    """How much lower the allocated peak would be with `num_bytes[i]` fewer between the events `begin[i]` and `end[i]`, for each i.

    While any of them is removed, `kept_bytes` are added for what a suggestion needs in their place. Never negative.
    """
    if not history.num_events:
        return 0
    changes = np.zeros(history.num_events + 1, dtype=np.int64)
    lasting = begin < end
    # add.at and not +=, which would count repeated indices once.
    np.add.at(changes, np.maximum(begin[lasting], 0), num_bytes[lasting])
    np.add.at(changes, end[lasting], -num_bytes[lasting])
    removed = np.cumsum(changes)[:-1]
    # A replacement is never larger than what it replaces.
    lowered = history.allocated - removed + np.where(removed > 0, np.minimum(kept_bytes, removed), 0)
    return max(0, int(history.allocated.max()) - int(lowered.max()))
