"""Inserts calls of `torch.cuda.empty_cache` into a tape."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from tightfit.tape import EventKind, Events, Spans, Tape


def with_emptied_cache(tape: Tape, at: Sequence[int]) -> Tape:
    """`tape` with an `EMPTY_CACHE` before each of the events `at`, in the span of that event."""
    moments = np.unique(np.asarray(at, dtype=np.int64))
    events, spans = tape.events, tape.spans
    operator = np.insert(
        events.operator, moments, np.where(moments > 0, events.operator[np.maximum(moments - 1, 0)], 0)
    )
    columns = {
        "kind": np.insert(events.kind, moments, EventKind.EMPTY_CACHE),
        "storage": np.insert(events.storage, moments, -1),
        "operator": operator,
        "value": np.insert(events.value, moments, 0),
    }
    # searchsorted from the left: an event inserted at a span's begin belongs to that span.
    moved = spans.columns() | {
        "begin": spans.begin + np.searchsorted(moments, spans.begin),
        "end": spans.end + np.searchsorted(moments, spans.end),
    }
    return dataclasses.replace(tape, events=Events.from_columns(columns), spans=Spans.from_columns(moved))
