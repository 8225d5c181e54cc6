"""Builds the memory history of a run from a tape or from a recording of torch's allocator, by replaying it block by block.

The history of a tape has the peaks of its estimate, because the tape goes through the same replay with the same limit and workspaces.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np

from tightfit.allocator.caching import CachingAllocator
from tightfit.allocator.pools import Block
from tightfit.allocator.settings import AllocatorSettings
from tightfit.cost.roofline import operator_seconds
from tightfit.devices.calibration import Calibration
from tightfit.devices.device import Device
from tightfit.errors import UsageError
from tightfit.recordings.categories import Lives, annotated_spans, guess_categories, guess_spans, phases_of
from tightfit.recordings.frames import place_of
from tightfit.recordings.marks import Marks
from tightfit.recordings.read import Action, DeviceRecording, Recording
from tightfit.recordings.replayed import replay
from tightfit.simulate.communicators import beside, communicators_of
from tightfit.simulate.history import UNKNOWN, Blocks, History, HistorySpan
from tightfit.simulate.peak import as_usable
from tightfit.simulate.timeline_bytes import Watch, timeline_on
from tightfit.simulate.workspaces import with_workspaces_of
from tightfit.tape import Assumption, Column, EventKind, SpanKind, Tape

_MICROSECONDS = 1e6
_SPAN_KINDS: dict[SpanKind, Literal["setup", "step", "aside"]] = {
    SpanKind.SETUP: "setup",
    SpanKind.STEP: "step",
    SpanKind.ASIDE: "aside",
}


def history_of_tape(
    tape: Tape,
    device: Device,
    settings: AllocatorSettings | None = None,
    calibration: Calibration | None = None,
    *,
    watch: Watch | None = None,
) -> History:
    """The history of `tape` on `device`; its peaks are those of `estimate_peak` with the same arguments.

    `time_us` is the time at which the GPU would have finished the operators before each event, one after another, by the roofline model. A stack
    is the one frame that a tape knows: the user's line and the operator. `watch` is called after each event, with the blocks by storage.

    Raises:
        UsageError: the calibration was made on another GPU.
    """
    settings = settings or AllocatorSettings()
    device = device if calibration is None else calibration.applied_to(device)
    tape = with_workspaces_of(device, tape, calibration)
    addresses = np.full(len(tape.storages), -1, dtype=np.int64)
    kinds, storages = tape.events.kind.tolist(), tape.events.storage.tolist()

    def look(event: int, allocator: CachingAllocator, blocks: Mapping[int, Block]) -> None:
        if event >= 0 and kinds[event] == EventKind.ALLOCATE and storages[event] in blocks:
            addresses[storages[event]] = blocks[storages[event]].address
        if watch is not None:
            watch(event, allocator, blocks)

    communicators = communicators_of(tape, device)
    usable = as_usable(device, tape, settings, None)
    timeline = timeline_on(beside(usable, communicators), tape, settings, watch=look)
    stack, stacks = _stacks(tape)
    module, modules = _modules(tape)
    held = _in_order_of_birth(tape, timeline.block_bytes)
    columns = {
        "num_bytes": tape.storages.num_bytes,
        "block_bytes": timeline.block_bytes,
        "address": addresses,
        "lane": tape.storages.stream,
        "category": tape.storages.category,
        "stack": stack,
        "module": module,
        **_lifetimes(tape),
    }
    seconds = np.append(0.0, np.cumsum(operator_seconds(tape, device, calibration)))
    return History(
        label=tape.target,
        origin="estimate",
        device=device.name,
        capacity_bytes=device.capacity_bytes,
        context_bytes=device.context_bytes + communicators,
        communicator_bytes=communicators,
        settings=settings,
        allocated=timeline.allocated,
        reserved=timeline.reserved,
        time_us=(seconds[tape.events.operator] * _MICROSECONDS).astype(np.int64),
        blocks=Blocks(**{name: column[held].astype(np.int64) for name, column in columns.items()}),
        stacks=stacks,
        modules=modules,
        spans=_spans(tape),
        assumptions=tape.assumptions,
        module_classes=tape.module_classes,
    )


def history_of_recording(
    recording: Recording,
    device_index: int | None = None,
    *,
    settings: AllocatorSettings | None = None,
    watch: Watch | None = None,
) -> History:
    """The history of a recording, by default of the device that `device_of` chooses.

    Steps, categories and modules come from the recording's marks; without those they are guessed, which its assumptions say. `settings` are
    those that were recorded unless given. `watch` is called after each event, with the blocks by recorded address.

    Raises:
        UsageError: the recording does not have that device.
        RecordingError: its marks cannot be read.
    """
    chosen = device_of(recording, device_index)
    if not chosen.num_events:
        chosen = _with_the_snapshot(chosen)
        recording = dataclasses.replace(recording, devices=(chosen,))
    follower = _Follower(chosen, watch)
    # Replayed rather than read off: events have requested sizes, and only the allocator knows the size of a block.
    replay(recording, settings=settings, device=chosen.device, watch=follower.look)
    columns = {name: np.asarray(column, dtype=np.int64) for name, column in follower.rows.items()}
    columns["freed_at"] = np.where(columns["freed_at"] < 0, chosen.num_events, columns["freed_at"])
    marks = None if recording.extra is None else Marks.from_plain(recording.extra)
    # Marks are of one device; the others of the same file are guessed.
    marks = marks if marks is not None and marks.trace == chosen.device else None
    named = _as_guessed(recording, columns, chosen) if marks is None else _as_marked(marks, columns, chosen)
    # Recordings have Unix time; histories begin at 0.
    begin_us = int(chosen.time_us[0]) if chosen.num_events else 0
    return History(
        label=Path(recording.path).name,
        origin="estimate" if marks is not None and marks.origin == "estimate" else "recording",
        device=f"cuda:{chosen.device}" if marks is None else marks.device,
        capacity_bytes=None if marks is None else marks.capacity_bytes,
        context_bytes=None if marks is None else marks.context_bytes,
        settings=settings or recording.settings,
        allocated=follower.timeline[0],
        reserved=follower.timeline[1],
        time_us=chosen.time_us - begin_us if chosen.time_us.any() else np.zeros(0, dtype=np.int64),
        blocks=Blocks(**(columns | {"category": named.category, "module": named.module})),
        stacks=recording.stacks,
        modules=named.modules,
        spans=named.spans,
        assumptions=named.assumptions,
        are_spans_guessed=marks is None,
    )


def device_of(recording: Recording, index: int | None = None) -> DeviceRecording:
    """The device of that index, by default the one that ran out of memory, or else the one with most events.

    Raises:
        UsageError: the recording does not have that device.
    """
    found = recording.busy if index is None else [one for one in recording.devices if one.device == index]
    if not found:
        there = ", ".join(str(one.device) for one in recording.devices)
        raise UsageError(f"{recording.path} has nothing of device {index}; it has {there}")
    return max(
        found,
        key=lambda one: ((one.action == Action.OOM).any(), one.num_events, len(one.segments), -one.device),
    )


class _Follower:
    """Collects the blocks of a recording while it is replayed: `rows` are the columns of `Blocks` without categories and modules."""

    def __init__(self, recording: DeviceRecording, watch: Watch | None) -> None:
        self.timeline = np.zeros((2, recording.num_events), dtype=np.int64)
        self.rows: dict[str, list[int]] = {
            name: [] for name in ("num_bytes", "block_bytes", "address", "lane", "allocated_at", "freed_at", "stack")
        }
        self._watch = watch
        self._alive: dict[int, int] = {}
        self._actions, self._addresses = recording.action.tolist(), recording.address.tolist()
        self._stacks = recording.stack.tolist()
        self._stacks_at_end = {
            block.address: block.stack for segment in recording.segments for block in segment.blocks if block.is_live
        }

    def look(self, event: int, allocator: CachingAllocator, blocks: Mapping[int, Block]) -> None:
        """A `Watch`."""
        if event < 0:
            for address in sorted(blocks):
                # A block that waits for another stream is freed already, as far as the program is concerned.
                if blocks[address].is_live:
                    self._add(event, address, blocks[address], 0)
        else:
            self.timeline[:, event] = allocator.allocated_bytes, allocator.reserved_bytes
            action, address = self._actions[event], self._addresses[event]
            if action == Action.ALLOC:
                self._add(event, address, blocks[address], self._stacks[event])
            elif action == Action.FREE_REQUESTED and address in self._alive:
                # At free_requested, when the program frees it, whatever streams still use it.
                self.rows["freed_at"][self._alive.pop(address)] = event
            # Only now is it known which blocks outlast the recording.
            if event + 1 == len(self._actions):
                self._name_what_lasted()
        if self._watch is not None:
            self._watch(event, allocator, blocks)

    def _add(self, event: int, address: int, block: Block, stack: int) -> None:
        self._alive[address] = len(self.rows["allocated_at"])
        row = (block.requested_bytes, block.size, block.address, block.pool.stream, event, -1, stack)
        for column, value in zip(self.rows.values(), row, strict=True):
            column.append(value)

    def _name_what_lasted(self) -> None:
        """Gives blocks that were allocated throughout the recording the stack that the segments at its end have for them."""
        for address, index in self._alive.items():
            if self.rows["allocated_at"][index] < 0:
                self.rows["stack"][index] = self._stacks_at_end.get(address, 0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Named:
    """Categories and modules of recorded blocks, an entry for each block, with the spans."""

    category: Column
    module: Column
    modules: tuple[str, ...]
    spans: tuple[HistorySpan, ...]
    assumptions: tuple[Assumption, ...]


def _with_the_snapshot(device: DeviceRecording) -> DeviceRecording:
    """A recording without events with one for the snapshot itself, as torch records it: its state can be looked at then."""
    zero = np.zeros(1, dtype=np.int64)
    return dataclasses.replace(
        device,
        action=np.full(1, Action.OTHER, dtype=np.int64),
        address=zero,
        num_bytes=zero,
        lane=zero,
        time_us=zero,
        stack=zero,
        user_metadata=zero,
        compile_context=zero,
    )


_NO_EVENTS = Assumption(
    where="recording",
    what="no event was recorded (torch.cuda.memory._record_memory_history was not called before): this is the state at the snapshot, "
    "not the peak of the run",
)


def _as_guessed(recording: Recording, columns: Mapping[str, Column], chosen: DeviceRecording) -> _Named:
    places = [place_of(stack) for stack in recording.stacks]
    lives = Lives(
        num_events=chosen.num_events,
        **{name: columns[name] for name in ("allocated_at", "freed_at", "num_bytes", "stack")},
    )
    phases = phases_of(places, lives)
    # Frees after the last allocation belong to the end of the program, not to a step.
    last_request = int(lives.allocated_at.max(initial=-1))
    told = annotated_spans(recording.annotations, chosen.device, chosen.time_us, last_request)
    spans = told or guess_spans(lives, phases)
    return _Named(
        category=guess_categories(lives, phases, places, spans),
        module=np.zeros(len(lives.allocated_at), dtype=np.int64),
        modules=("",),
        spans=spans,
        assumptions=(
            Assumption(
                where="categories and steps",
                what="guessed from the stacks and lifetimes of the blocks, since the recording does not say",
            ),
            *([] if (chosen.action != Action.OTHER).any() else [_NO_EVENTS]),
        ),
    )


def _as_marked(marks: Marks, columns: Mapping[str, Column], chosen: DeviceRecording) -> _Named:
    allocated_at = columns["allocated_at"]
    of_event = marks.category_of_events(chosen.num_events)
    of_start = dict(zip(marks.start_addresses.tolist(), marks.start_categories.tolist(), strict=True))
    at_start = [of_start.get(address, UNKNOWN) for address in columns["address"][allocated_at < 0].tolist()]
    modules = marks.module_of_events(chosen.num_events)[allocated_at[allocated_at >= 0]]
    return _Named(
        category=np.append(np.asarray(at_start, dtype=np.int64), of_event[allocated_at[allocated_at >= 0]]),
        module=np.append(
            np.full(len(at_start), len(marks.modules)), np.where(modules < 0, len(marks.modules), modules)
        ),
        modules=(*marks.modules, ""),
        spans=marks.spans,
        assumptions=marks.assumptions,
    )


def _lifetimes(tape: Tape) -> dict[str, Column]:
    """The events that allocate and free each storage; the number of events for never."""
    num_storages, num_events = len(tape.storages), len(tape.events)
    lifetimes = {}
    for name, kind in (("allocated_at", EventKind.ALLOCATE), ("freed_at", EventKind.FREE)):
        at = np.flatnonzero(tape.events.kind == kind)
        lifetimes[name] = np.full(num_storages, num_events, dtype=np.int64)
        lifetimes[name][tape.events.storage[at]] = at
    return lifetimes


def _in_order_of_birth(tape: Tape, block_bytes: Column) -> Column:
    """The storages that had a block, in the order of allocation."""
    allocated_at = tape.events.storage[tape.events.kind == EventKind.ALLOCATE]
    # A cuDNN workspace that did not fit in the replay has no block.
    return allocated_at[block_bytes[allocated_at] > 0]


def _stacks(tape: Tape) -> tuple[Column, tuple[tuple[str, ...], ...]]:
    """For each storage the index of its stack: one frame, such as `train.py:41 aten.addmm`, or none where no operator allocated it."""
    operators, strings = tape.operators, tape.strings
    of_operator = operators.line.astype(np.int64) * len(strings) + operators.name
    known, index = np.unique(of_operator, return_inverse=True)
    frames = [f"{strings[place // len(strings)]} {strings[place % len(strings)]}".strip() for place in known.tolist()]
    # Storages without an operator have -1, which indexes the entry appended here.
    return np.append(index, len(frames))[tape.storages.operator], (*((frame,) for frame in frames), ())


def _modules(tape: Tape) -> tuple[Column, tuple[str, ...]]:
    known, index = np.unique(tape.operators.module, return_inverse=True)
    names = [tape.strings[name] for name in known.tolist()]
    return np.append(index, len(names))[tape.storages.operator], (*names, "")


def _spans(tape: Tape) -> tuple[HistorySpan, ...]:
    rows = zip(*(column.tolist() for column in tape.spans.columns().values()), strict=True)
    return tuple(
        HistorySpan(name=tape.strings[name], kind=_SPAN_KINDS[SpanKind(kind)], begin=begin, end=end)
        for name, kind, begin, end in rows
    )
