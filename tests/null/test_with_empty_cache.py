"""A tape whose allocator gives back its cache at a border: what is reserved falls, spans keep their events."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tightfit.allocator.settings import AllocatorSettings
from tightfit.simulate.timeline_bytes import replay_timeline
from tightfit.simulate.with_empty_cache import with_emptied_cache
from tightfit.tape import EventKind, Events, Operators, Spans, Storages, Tape

MIB = 1 << 20


def tape_of(sizes: list[int], events: list[tuple[int, int]], spans: list[tuple[int, int]]) -> Tape:
    number = len(sizes)
    return Tape(
        target="run",
        versions={},
        traced_for="NVIDIA GeForce RTX 4090",
        strings=("", "step"),
        operators=Operators.from_columns(
            {
                key: []
                for key in (
                    *("name", "module", "line", "dtype", "phase", "stream"),
                    *("flops", "bytes_read", "bytes_written"),
                )
            }
        ),
        storages=Storages.from_columns(
            {
                "num_bytes": sizes,
                "low_bytes": sizes,
                "high_bytes": sizes,
                "category": [4] * number,
                "source": [0] * number,
                "operator": [-1] * number,
                "stream": [0] * number,
            }
        ),
        events=Events.from_columns(
            {
                "kind": [kind for kind, _ in events],
                "storage": [storage for _, storage in events],
                "operator": [0] * len(events),
                "value": [0] * len(events),
            }
        ),
        spans=Spans.from_columns(
            {
                "name": [1] * len(spans),
                "kind": [1] * len(spans),
                "begin": [b for b, _ in spans],
                "end": [e for _, e in spans],
            }
        ),
        assumptions=(),
        host_peak_bytes=0,
    )


def test_a_segment_that_is_too_small_for_what_comes_is_given_back_first() -> None:
    allocate, free = int(EventKind.ALLOCATE), int(EventKind.FREE)
    tape = tape_of([64 * MIB, 96 * MIB], [(allocate, 0), (free, 0), (allocate, 1), (free, 1)], [(0, 2), (2, 4)])
    plain = replay_timeline(tape, AllocatorSettings())
    emptied_tape = with_emptied_cache(tape, [2])
    emptied = replay_timeline(emptied_tape, AllocatorSettings())
    assert plain.reserved.max() == 160 * MIB
    assert emptied.reserved.max() == 96 * MIB
    assert emptied.allocated.max() == plain.allocated.max()
    assert emptied_tape.spans.begin.tolist() == [0, 2]
    assert emptied_tape.spans.end.tolist() == [2, 5]


@given(st.lists(st.integers(1, 64 * MIB), min_size=1, max_size=20), st.data())
def test_the_events_stay_in_order_and_in_their_spans(sizes: list[int], data: st.DataObject) -> None:
    events = [(int(EventKind.ALLOCATE), i) for i in range(len(sizes))]
    events += [(int(EventKind.FREE), i) for i in range(len(sizes))]
    border = data.draw(st.integers(0, len(events)))
    at = data.draw(st.lists(st.integers(0, len(events) - 1), max_size=5))
    tape = tape_of(sizes, events, [(0, border), (border, len(events))])
    emptied = with_emptied_cache(tape, at)
    kept = emptied.events.kind != EventKind.EMPTY_CACHE
    assert int((~kept).sum()) == len(set(at))
    assert emptied.events.storage[kept].tolist() == tape.events.storage.tolist()
    position = np.flatnonzero(kept)
    for begin, end, old_begin, old_end in zip(
        emptied.spans.begin, emptied.spans.end, tape.spans.begin, tape.spans.end, strict=True
    ):
        inside = position[(position >= begin) & (position < end)]
        assert len(inside) == old_end - old_begin
