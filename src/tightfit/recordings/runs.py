"""Turns the data of a recorder into a recording with marks.

torch's own snapshot of a GPU stays as it is and gets marks. Tensors on the host are replayed through a simulated CUDA allocator, which decides
where torch would have placed them, so that such a recording opens wherever one of a GPU does.
"""

import dataclasses
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np

from tightfit.allocator.caching import CachingAllocator
from tightfit.allocator.pools import Block
from tightfit.allocator.settings import AllocatorSettings, settings_of_environment
from tightfit.recordings.allocator_trace import NO_CATEGORY, TraceBuilder
from tightfit.recordings.classify import classify
from tightfit.recordings.marks import KEY, Marks
from tightfit.recordings.notes import PlacedNote, modules_of, steps_of
from tightfit.recordings.write import annotations_of, snapshot_of
from tightfit.runtime.recorded import NOTE_PREFIX, CardRun, HostRun, Note, is_own_frame
from tightfit.simulate.history import CATEGORIES
from tightfit.tape import Assumption

HOST_DEVICE = "host (CPU tensors)"

Plain = dict[str, Any]


def snapshot_of_card_run(run: CardRun, *, was_cut_short: bool) -> tuple[Plain, Marks]:
    """torch's snapshot with marks, and the marks. Events get their category, and their module in place of the number of a note."""
    trace = run.snapshot["device_traces"][run.index]
    notes = [
        PlacedNote(note=note, event=event, held=() if run.has_dropped_events and not event else note.held)
        for note, event in zip(run.notes, _events_of_notes(trace, run.notes), strict=True)
    ]
    segments = [s for s in run.snapshot["segments"] if s.get("device", 0) == run.index]
    marks = dataclasses.replace(
        _host_marks(trace, segments, notes, was_cut_short=was_cut_short),
        origin="card",
        trace=run.index,
        device=run.device,
        capacity_bytes=run.capacity_bytes,
        context_bytes=run.context_bytes,
        assumptions=_assumed_of_dropped(len(trace)) if run.has_dropped_events else (),
    )
    _colour(trace, marks)
    _drop_own_frames([*trace, *segments, *(block for segment in segments for block in segment["blocks"])])
    annotations = [*run.snapshot.get("external_annotations", ()), *annotations_of(trace, marks)]
    return {**run.snapshot, "external_annotations": annotations, KEY: marks.to_plain()}, marks


def _events_of_notes(trace: Sequence[Plain], notes: Sequence[Note]) -> list[int]:
    """The event that follows each note: by the number in the events' `user_metadata`, or by time where there is none."""
    # torch.cuda.memory._set_memory_metadata puts a text on every later event, which orders notes and events exactly; times, with a
    # resolution of a microsecond, do not.
    stamps = [event.get("user_metadata", "") for event in trace]
    numbers = [int(s.removeprefix(NOTE_PREFIX)) if s.startswith(NOTE_PREFIX) else -1 for s in stamps]
    if max(numbers, default=-1) < 0:
        times = [event.get("time_us", 0) for event in trace]
        return [bisect_left(times, note.time_us) for note in notes]
    # An event without a stamp, such as one of another thread, belongs to the note of the event before it.
    latest = np.maximum.accumulate(np.array(numbers, dtype=np.int64))
    return np.searchsorted(latest, np.arange(len(notes))).tolist()


def snapshot_of_host_run(run: HostRun, *, max_events: int, was_cut_short: bool) -> tuple[Plain, Marks]:
    """The recording that torch's CUDA allocator would have made, with the settings of the environment, and its marks; the last `max_events` events."""
    settings = AllocatorSettings.parse(settings_of_environment())
    trace = TraceBuilder(CachingAllocator(settings))
    notes = _feed(run, trace)
    num_dropped = max(0, len(trace.events) - max_events)
    del trace.events[:num_dropped]
    notes = [
        # Notes of dropped events keep their order but not their addresses, which may belong to other blocks by now.
        PlacedNote(note=n.note, event=max(0, n.event - num_dropped), held=() if n.event < num_dropped else n.held)
        for n in notes
    ]
    marks = _host_marks(trace.events, trace.segments(), notes, was_cut_short=was_cut_short)
    if num_dropped:
        marks = dataclasses.replace(marks, assumptions=(*marks.assumptions, *_assumed_of_dropped(max_events)))
    _colour(trace.events, marks)
    return snapshot_of(trace, settings, marks), marks


def _feed(run: HostRun, trace: TraceBuilder) -> list[PlacedNote]:
    """Replays allocations and frees through the simulated allocator of `trace`; returns the notes with simulated addresses."""
    notes: list[PlacedNote] = []
    blocks: dict[int, Block] = {}
    for number, event in enumerate(run.events):
        if number == run.num_at_start:
            trace.begin()
        trace.time_us = event.time_us
        if isinstance(event, Note):
            held = tuple((c, tuple(blocks[n].address for n in numbers if n in blocks)) for c, numbers in event.held)
            notes.append(PlacedNote(note=event, event=len(trace.events), held=held))
        elif event.num_bytes > 0:
            block = blocks[event.storage] = trace.allocator.malloc(event.num_bytes)
            trace.allocated(event.storage, block, run.stacks[event.stack], category=NO_CATEGORY)
        elif event.storage in blocks:
            trace.allocator.free(blocks.pop(event.storage))
            trace.freed(event.storage)
    return notes


def _host_marks(
    trace: Sequence[Plain], segments: Sequence[Plain], notes: Sequence[PlacedNote], *, was_cut_short: bool
) -> Marks:
    """The marks from the notes, with the fields of a run on the host."""
    spans = steps_of(notes, len(trace), was_cut_short=was_cut_short)
    step_ends = [span.end for span in spans if span.kind == "step"]
    start_addresses = _addresses_at_start(trace, segments)
    events, categories, addresses, start_categories = classify(trace, start_addresses, notes, step_ends)
    module_events, module_values, modules = modules_of(trace, notes)
    what = "recorded from tensors on the host; addresses, rounding and segments are those of a simulated CUDA allocator"
    return Marks(
        origin="host",
        trace=0,
        device=HOST_DEVICE,
        capacity_bytes=None,
        context_bytes=None,
        spans=spans,
        category_events=events,
        categories=categories,
        start_addresses=addresses,
        start_categories=start_categories,
        module_events=module_events,
        module_values=module_values,
        modules=tuple(modules),
        assumptions=(Assumption(where=HOST_DEVICE, what=what),),
    )


def _addresses_at_start(trace: Sequence[Plain], segments: Sequence[Plain]) -> list[int]:
    """The blocks allocated before the first event: those of the end, with the events undone from the last to the first."""
    alive = set()
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                alive.add(address)
            address += block["size"]
    for event in reversed(trace):
        if event["action"] == "alloc":
            alive.discard(event["addr"])
        elif event["action"] == "free_requested":
            alive.add(event["addr"])
    return sorted(alive)


def _colour(trace: Sequence[Plain], marks: Marks) -> None:
    """Adds the category that torch's viewer colours by (one of them must be "unknown"), and the module of each allocation."""
    categories, modules = marks.category_of_events(len(trace)).tolist(), marks.module_of_events(len(trace)).tolist()
    for event, category, module in zip(trace, categories, modules, strict=True):
        if event.get("user_metadata", "").startswith(NOTE_PREFIX):
            event["user_metadata"] = ""
        if event["action"] != "alloc":
            event["category"] = NO_CATEGORY
            continue
        event["category"] = CATEGORIES[category]
        if module >= 0:
            event["user_metadata"] = marks.modules[module]


def _drop_own_frames(entries: Sequence[Plain]) -> None:
    """Removes this package's frames from the stacks, which entries share."""
    seen = set()
    for entry in entries:
        frames = entry.get("frames", [])
        if id(frames) not in seen:
            seen.add(id(frames))
            frames[:] = [frame for frame in frames if not is_own_frame(frame["filename"])]


def _assumed_of_dropped(num_events: int) -> tuple[Assumption, ...]:
    return (Assumption(where="recording", what=f"only the last {num_events} events were kept (max_events)"),)
