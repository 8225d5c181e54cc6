"""Writes recordings: of a traced run, for torch's own viewer and for `tightfit replay`, and any other snapshot.

A tape goes through the same replay as for an estimate, so that the recording has the estimate's peaks to the byte. Its times come from the
roofline model, its addresses from the simulation, and each allocation has one frame: the user's line and the operator. Steps, categories,
modules and the GPU are written twice: for the viewer as annotations and fields of its own, and as `tightfit.recordings.marks`.
"""

import os
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tightfit.allocator.caching import CachingAllocator
from tightfit.allocator.pools import Block
from tightfit.allocator.settings import AllocatorSettings
from tightfit.cost.roofline import operator_seconds
from tightfit.devices.calibration import Calibration
from tightfit.devices.device import Device
from tightfit.output_files import writing
from tightfit.recordings.allocator_trace import NO_FRAMES, Frames, TraceBuilder, plain_settings
from tightfit.recordings.marks import KEY, SPAN_KINDS, Marks
from tightfit.simulate.communicators import beside, communicators_of
from tightfit.simulate.history import CATEGORIES, HistorySpan
from tightfit.simulate.peak import as_usable
from tightfit.simulate.timeline_bytes import timeline_on
from tightfit.simulate.workspaces import with_workspaces_of
from tightfit.tape import EventKind, Tape

# torch's hosted viewer reads no protocol above 4 (pytorch issue #183842).
PROTOCOL = 4
_MICROSECONDS = 1e6


def write_snapshot(path: str | os.PathLike[str], snapshot: Mapping[str, Any]) -> int:
    """Writes a recording atomically; returns its size in bytes.

    Raises:
        OutputError: the file cannot be written.
    """
    with writing(path) as file:
        pickle.dump(dict(snapshot), file, protocol=PROTOCOL)
        file.flush()
        return os.fstat(file.fileno()).st_size


def write_tape(
    path: str | os.PathLike[str],
    tape: Tape,
    device: Device,
    settings: AllocatorSettings | None = None,
    calibration: Calibration | None = None,
) -> int:
    """Writes the run of `tape` on `device` as a recording; returns its size in bytes. The arguments are those of `estimate_peak`.

    Raises:
        UsageError: the calibration was made on another GPU.
    """
    return write_snapshot(path, snapshot_of_tape(tape, device, settings, calibration))


def snapshot_of_tape(
    tape: Tape,
    device: Device,
    settings: AllocatorSettings | None = None,
    calibration: Calibration | None = None,
) -> dict[str, Any]:
    """The recording of `tape` on `device`, in the form of torch's `_snapshot`, with marks.

    Raises:
        UsageError: the calibration was made on another GPU.
    """
    settings = settings or AllocatorSettings()
    device = device if calibration is None else calibration.applied_to(device)
    tape = with_workspaces_of(device, tape, calibration)
    seconds = np.append(0.0, np.cumsum(operator_seconds(tape, device, calibration)))
    writer = _TapeWriter(tape, (seconds[tape.events.operator] * _MICROSECONDS).astype(np.int64).tolist())
    usable = as_usable(device, tape, settings, None)
    timeline_on(beside(usable, communicators_of(tape, device)), tape, settings, watch=writer.watch)
    marks = writer.marks(device)
    return snapshot_of(writer.trace, settings, marks)


def snapshot_of(trace: TraceBuilder, settings: AllocatorSettings, marks: Marks) -> dict[str, Any]:
    """The recording of a simulated allocator."""
    return {
        "segments": trace.segments(),
        "device_traces": [trace.events],
        "allocator_settings": plain_settings(settings),
        "external_annotations": annotations_of(trace.events, marks),
        KEY: marks.to_plain(),
    }


def annotations_of(trace: Sequence[Mapping[str, Any]], marks: Marks) -> list[dict[str, Any]]:
    """The steps in the form in which a recording has `torch.profiler.record_function` ranges."""
    annotations = []
    for span in marks.spans:
        for stage, event in (("START", span.begin), ("END", span.end)):
            time_us = trace[min(event, len(trace) - 1)].get("time_us", 0) if trace else 0
            annotations.append({"name": span.name, "stage": stage, "device": marks.trace, "time_us": time_us})
    return annotations


class _TapeWriter:
    """Builds the trace of a tape while it is replayed."""

    def __init__(self, tape: Tape, times_us: Sequence[int]) -> None:
        self.tape = tape
        self.trace: TraceBuilder
        self._times_us = times_us
        self._kinds, self._storages = tape.events.kind.tolist(), tape.events.storage.tolist()
        self._operators = tape.storages.operator.tolist()
        self._categories = tape.storages.category.tolist()
        self._frames: dict[tuple[int, int], Frames] = {}
        self._begin()

    def _begin(self) -> None:
        self._ends: list[int] = []
        self._alive: set[int] = set()
        self._born: list[tuple[int, int]] = []  # the event and the storage

    def watch(self, event: int, allocator: CachingAllocator, blocks: Mapping[int, Block]) -> None:
        """The callback of `replay_timeline`; it starts over where the GPU turned out to be too small."""
        if event < 0:
            self.trace = TraceBuilder(allocator)
            self._begin()
            return
        kind, storage = self._kinds[event], self._storages[event]
        self.trace.time_us = self._times_us[event]
        # A cuDNN workspace that found no memory has no block.
        if kind == EventKind.ALLOCATE and storage in blocks:
            self._alive.add(storage)
            at = self.trace.allocated(
                storage,
                blocks[storage],
                self._frames_of(storage),
                category=CATEGORIES[self._categories[storage]],
                module=self._module(storage),
            )
            self._born.append((at, storage))
        elif kind == EventKind.FREE and storage in self._alive:
            self._alive.remove(storage)
            self.trace.freed(storage)
        elif kind in (EventKind.SYNCHRONIZE, EventKind.EMPTY_CACHE):
            self.trace.caught_up()
        self._ends.append(len(self.trace.events))

    def _frames_of(self, storage: int) -> Frames:
        """The single frame of a storage: the user's line and the operator."""
        operator = self._operators[storage]
        if operator < 0:
            return NO_FRAMES
        operators, strings = self.tape.operators, self.tape.strings
        key = (int(operators.line[operator]), int(operators.name[operator]))
        if key not in self._frames:
            file, _, line = strings[key[0]].rpartition(":")
            self._frames[key] = [
                {"filename": file, "line": int(line) if line.isdigit() else 0, "name": strings[key[1]]}
            ]
        return self._frames[key]

    def _module(self, storage: int) -> str:
        operator = self._operators[storage]
        return self.tape.strings[self.tape.operators.module[operator]] if operator >= 0 else ""

    def marks(self, device: Device) -> Marks:
        """The marks of the trace that was written last."""
        events = np.array([event for event, _ in self._born], dtype=np.int64)
        storages = np.array([storage for _, storage in self._born], dtype=np.int64)
        # Storages without an operator have -1, which indexes the entry appended here.
        module_of_operator = np.append(self.tape.operators.module, -1)
        modules, module = np.unique(module_of_operator[self.tape.storages.operator[storages]], return_inverse=True)
        begins = [0, *self._ends]
        nothing = np.zeros(0, dtype=np.int64)
        spans = self.tape.spans.columns()
        return Marks(
            origin="estimate",
            trace=0,
            device=device.name,
            capacity_bytes=device.capacity_bytes,
            context_bytes=device.context_bytes + communicators_of(self.tape, device),
            spans=tuple(
                HistorySpan(name=self.tape.strings[n], kind=SPAN_KINDS[kind], begin=begins[begin], end=begins[end])
                for n, kind, begin, end in zip(*(column.tolist() for column in spans.values()), strict=True)
            ),
            category_events=events,
            categories=self.tape.storages.category[storages].astype(np.int64),
            start_addresses=nothing,
            start_categories=nothing,
            module_events=events,
            module_values=module.astype(np.int64),
            modules=tuple(self.tape.strings[index] if index >= 0 else "" for index in modules.tolist()),
            assumptions=self.tape.assumptions,
        )
