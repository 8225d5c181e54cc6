"""A history as Chrome trace events for ui.perfetto.dev: counters of allocated, reserved and each category, the steps as slices, the peak, and what runs
when in a predicted step.

Times are microseconds. torch.profiler writes a trace's own beginning as `baseTimeNanoseconds`, Unix time, and `ts` from there on (libkineto,
output_json.cpp and ChromeTraceBaseTime); torch's allocator stamps its events `time_us` with Unix time (c10/cuda/CUDACachingAllocator.cpp, through
c10/util/ApproximateClock.h). So a recording and a profile of one run overlay when both are counted from one beginning, which `merged` does.
"""

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tightfit.errors import RecordingError
from tightfit.reports.downsampled_timeline import Detail, category_timelines, timeline
from tightfit.reports.summary import summarize
from tightfit.simulate.history import CATEGORIES, History
from tightfit.simulate.step_tracks import StepTracks
from tightfit.tape import Column

# A process ID that no trace of torch.profiler has: it uses PIDs for processes and indices for GPUs.
PROCESS = 7_432_308
STEP_PROCESS = PROCESS + 1
# Perfetto's UI holds the trace in the browser's memory; beyond this a file has some 30 MB and more.
MAX_WHOLE_EVENTS = 200_000
_DETAIL = Detail(num_even=60_000, num_in_step=30_000, num_around_peak=4000, num_around_step_peaks=500, num_steps=16)
_MICROSECONDS = 1e6
# torch.profiler's export_chrome_trace compresses where the name ends in .gz.
_GZIP = b"\x1f\x8b"


def perfetto_text(history: History) -> str:
    """The whole file as JSON, its times from the first event on."""
    trace = {"displayTimeUnit": "ms", "traceEvents": list(trace_events(history))}
    return json.dumps(trace, separators=(",", ":"))


def merged(history: History, profile: str | os.PathLike[str], *, began_us: int) -> tuple[str, bool]:
    """The trace of torch.profiler in the file `profile`, plain or gzipped, with the memory of `history`; and whether their times overlap.

    `began_us` is the Unix time of the history's time 0.

    Raises:
        RecordingError: the file cannot be read or is no trace, or the history has no times.
    """
    if not len(history.time_us):
        raise RecordingError(f"{history.label} has no times to merge by")
    trace = _read_trace(os.fspath(profile))
    # Traces from before Kineto had a base time carry absolute microseconds.
    origin_us = int(trace.get("baseTimeNanoseconds", 0)) / 1000 - began_us
    times = [event["ts"] for event in trace["traceEvents"] if event.get("ph") == "X" and "ts" in event]
    first, last = float(history.time_us[0]) - origin_us, float(history.time_us[-1]) - origin_us
    overlaps = bool(times) and first <= max(times) and last >= min(times)
    trace["traceEvents"] += trace_events(history, origin_us=origin_us)
    return json.dumps(trace, separators=(",", ":")), overlaps


def trace_events(history: History, *, origin_us: float = 0.0) -> Iterator[dict[str, Any]]:
    """Trace events whose `ts` is the history's time less `origin_us`, or the number of the event where it has no times.

    Up to 200,000 events are kept whole; of more, the highest of each of some 100,000 buckets and the last of each.
    """
    shared = {"pid": PROCESS, "tid": 0}
    name = f"memory of {history.device or 'the card'}"
    yield {"name": "process_name", "ph": "M", **shared, "args": {"name": name}}
    yield {"name": "thread_name", "ph": "M", "pid": PROCESS, "tid": 1, "args": {"name": "steps"}}
    if not history.num_events:
        return
    times, chosen = _times(history, origin_us), _samples(history)
    by_category = [level[chosen] for level in category_timelines(history, np.arange(history.num_events))]
    used = [category for category, level in enumerate(by_category) if level.any()]
    rows = zip(
        times[chosen].tolist(),
        history.allocated[chosen].tolist(),
        history.reserved[chosen].tolist(),
        zip(*(by_category[category].tolist() for category in used), strict=True) if used else [()] * len(chosen),
        strict=True,
    )
    names = [CATEGORIES[category] for category in used]
    for at, allocated, reserved, held in rows:
        yield {"name": "bytes", "ph": "C", **shared, "ts": at, "args": {"allocated": allocated, "reserved": reserved}}
        if names:
            held_bytes = dict(zip(names, held, strict=True))
            yield {"name": "bytes of", "ph": "C", **shared, "ts": at, "args": held_bytes}
    yield from _slices(history, times)
    if history.step_tracks is not None:
        steps = [span.begin for span in history.spans if span.kind == "step" and span.begin < history.num_events]
        yield from _step_slices(history, history.step_tracks, float(times[steps[-1]]) if steps else 0.0)


def _step_slices(history: History, step: StepTracks, begin_us: float) -> Iterator[dict[str, Any]]:
    """The operators of the predicted step, one thread for each resource. Of very many those are left out that cannot be seen."""
    name = f"last step on {history.device}, predicted"
    yield {"name": "process_name", "ph": "M", "pid": STEP_PROCESS, "tid": 0, "args": {"name": name}}
    shortest = step.seconds / MAX_WHOLE_EVENTS
    for thread, track in enumerate(step.tracks):
        shared = {"pid": STEP_PROCESS, "tid": thread}
        yield {"name": "thread_name", "ph": "M", **shared, "args": {"name": track.resource}}
        is_long = len(track.work) > MAX_WHOLE_EVENTS
        for work in track.work:
            length = work.end_seconds - work.begin_seconds
            if is_long and length < shortest:
                continue
            yield {
                "name": work.name or work.what,
                "cat": work.what,
                "ph": "X",
                **shared,
                "ts": round(begin_us + work.begin_seconds * _MICROSECONDS, 3),
                "dur": round(length * _MICROSECONDS, 3),
                "args": {
                    "module": work.module,
                    "phase": work.phase.name.lower(),
                    "work": work.what,
                    "on the critical path": work.is_critical,
                },
            }


def _slices(history: History, times: Column) -> Iterator[dict[str, Any]]:
    """The steps, and an instant at the peak."""
    shared = {"pid": PROCESS, "tid": 1}
    for span in history.spans:
        begin, end = span.begin, min(span.end, history.num_events)
        if begin < end:
            duration = max(1.0, float(times[end - 1] - times[begin]))
            yield {"name": span.name, "cat": span.kind, "ph": "X", **shared, "ts": float(times[begin]), "dur": duration}
    summary = summarize(history)
    arguments = {
        "allocated": summary.peak_allocated_bytes,
        "line": summary.peak_line,
        "function": summary.peak_function,
        "module": summary.peak_module,
    }
    at = float(times[history.peak_event])
    yield {"name": "peak allocated", "ph": "i", "s": "p", **shared, "ts": at, "args": arguments}


def _times(history: History, origin_us: float) -> Column:
    """The time of each event; events of the same microsecond are a nanosecond apart, so that each is shown and their order kept."""
    if not len(history.time_us):
        return np.arange(history.num_events, dtype=np.float64)
    times = history.time_us
    is_new = np.diff(times, prepend=times[0] - 1) != 0
    first = np.maximum.accumulate(np.where(is_new, np.arange(len(times)), 0))
    return np.round(times - origin_us + np.minimum(np.arange(len(times)) - first, 999) / 1000, 3)


def _samples(history: History) -> Column:
    if history.num_events <= MAX_WHOLE_EVENTS:
        return np.arange(history.num_events)
    cut = timeline(history, _DETAIL)
    # The last event of each bucket too, or the counter would stay at a bucket's peak until the next one.
    return np.unique(np.concatenate([cut.at, cut.edges[1:] - 1]))


def _read_trace(path: str) -> dict[str, Any]:
    try:
        content = Path(path).read_bytes()
        trace = json.loads(gzip.decompress(content) if content.startswith(_GZIP) else content)
    except (OSError, EOFError, ValueError) as error:
        raise RecordingError(f"{path} is not a trace of torch.profiler that can be read: {error}") from error
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise RecordingError(f"{path} is not a trace of torch.profiler: it has no list 'traceEvents'")
    return trace
