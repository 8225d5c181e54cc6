"""Reads the recordings that `torch.cuda.memory._dump_snapshot` writes: allocator events, and the segments at the end.

The file is a pickle of plain containers from an unknown source, so it goes through `plain_pickle`, and the type and range of every figure are
checked. Whatever is wrong becomes a `RecordingError` of one line.
"""

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tightfit.allocator.settings import NUM_INTERVALS, AllocatorSettings
from tightfit.errors import RecordingError, UsageError
from tightfit.recordings.byte_window import NotPlain
from tightfit.recordings.completed_events import completed
from tightfit.recordings.events import (
    DEFAULT_POOL,
    MAX_DEVICES,
    MOST,
    Action,
    Column,
    EventRow,
    EventTable,
    Frame,
    Malformed,
    Shared,
    Stack,
    table_of,
)
from tightfit.recordings.file_kinds import kind_of
from tightfit.recordings.stream import EventList, load_recording

__all__ = [
    "Action",
    "Annotation",
    "Column",
    "DeviceRecording",
    "RecordedBlock",
    "RecordedSegment",
    "Recording",
    "read_recording",
]

_MAX_BLOCKS = 1 << 22
_DEEPEST = 16
_NUM_BYTES_LOOKED_AT = 64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecordedBlock:
    """A block at the end of the recording. `is_waiting`: freed while another stream still uses it; `stack` as in `DeviceRecording`."""

    address: int
    num_bytes: int
    requested_bytes: int
    is_live: bool
    is_waiting: bool
    stack: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSegment:
    """A segment at the end of the recording, or one contiguous mapped range of an expandable one; `lane` as in `DeviceRecording`."""

    address: int
    num_bytes: int
    lane: int
    is_small: bool
    is_expandable: bool
    blocks: tuple[RecordedBlock, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRecording:
    """The events of one device, as columns of equal length, and its segments at the end, by address.

    `num_bytes` of an allocation is the requested size, not the rounded one. `lane` says which pools serve the event: the stream
    for the default memory pool, and a negative number of its own for each stream of a private one (CUDA graphs, `MemPool`). `stack` indexes
    the recording's `stacks`, `user_metadata` and `compile_context` its `notes`; 0 is the empty one.
    `free_bytes_at_oom` is the GPU's free memory at each `OOM` event.
    """

    device: int
    action: Column
    address: Column
    num_bytes: Column
    lane: Column
    time_us: Column
    stack: Column
    user_metadata: Column
    compile_context: Column
    free_bytes_at_oom: Mapping[int, int]
    segments: tuple[RecordedSegment, ...]

    @property
    def num_events(self) -> int:
        """The number of recorded events."""
        return len(self.action)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Annotation:
    """The `START` or `END` of a range that torch or the program named, such as an optimizer's step."""

    stage: str
    name: str
    device: int
    time_us: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A whole recording. `settings` are those of the allocator that was recorded.

    `stacks[i]` lists frames from the innermost out, each as `file.py:41 function`, with `??` for an unknown file; stack 0 is empty.
    `notes[i]` is a text that events carry. `extra` is what tightfit's own recorder adds under the key `tightfit`, as plain data that
    `tightfit.recordings.marks` checks; None where some other program wrote the file.
    """

    path: str
    settings: AllocatorSettings
    devices: tuple[DeviceRecording, ...]
    stacks: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]
    annotations: tuple[Annotation, ...]
    extra: Mapping[str, Any] | None

    @property
    def busy(self) -> tuple[DeviceRecording, ...]:
        """The devices with events of memory, else those with segments, else the first: others have a context and nothing else."""
        moving = tuple(device for device in self.devices if (device.action != Action.OTHER).any())
        return moving or tuple(device for device in self.devices if device.segments) or self.devices[:1]


def read_recording(path: str | os.PathLike[str], *, progress: Callable[[str, float], None] | None = None) -> Recording:
    """Reads the recording at `path` through a window: its events are never held other than as columns.

    `progress` is called about once per MiB with what is done and its share, from 0 to 1.

    Raises:
        RecordingError: the file cannot be read, or is no recording of torch's CUDA allocator.
    """
    name = os.fspath(path)
    shared = Shared()
    try:
        with open(path, "rb") as file:
            kind = kind_of(file.read(_NUM_BYTES_LOOKED_AT))
            if kind is not None:
                raise NotPlain(kind)
            file.seek(0)
            total_bytes = max(1, os.fstat(file.fileno()).st_size)
            done_bytes = 0

            def advance(num_bytes: int) -> None:
                nonlocal done_bytes
                done_bytes += num_bytes
                if progress is not None:
                    progress("reading", min(1.0, done_bytes / total_bytes))

            value = load_recording(file.read, shared, advance)
        return _recording(name, value, shared)
    except OSError as error:
        raise RecordingError(f"{name} cannot be read: {error.strerror or error}") from error
    except NotPlain as error:
        raise RecordingError(f"{name} is not a memory recording that can be read: {error}") from error
    except Malformed as error:
        raise RecordingError(f"{name} is not a recording of torch's memory allocator: {error}") from error


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if type(value) is not dict:
        raise Malformed(f"{where} is no dict")
    return value


def _sequence(value: Any, where: str) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise Malformed(f"{where} is no list")
    return value


def _count(table: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = table.get(key, default)
    if type(value) is not int or not 0 <= value <= MOST:
        raise Malformed(f"'{key}' is missing or no whole number from 0 to 2**63 - 1")
    return value


def _text(table: Mapping[str, Any], key: str) -> str:
    value = table.get(key)
    if type(value) is not str:
        raise Malformed(f"'{key}' is missing or no text")
    return value


def _recording(name: str, value: Any, shared: Shared) -> Recording:
    whole = _mapping(_as_snapshot(value), "the whole")
    if "segments" not in whole or not (whole["segments"] or "device_traces" in whole):
        raise Malformed(
            "it lacks 'segments', the state at its end"
            if "device_traces" in whole
            else "it lacks 'segments' or 'device_traces'"
        )
    segments = [_mapping(s, "a segment") for s in _sequence(whole["segments"], "'segments'")]
    traces = _sequence(whole.get("device_traces", ()), "'device_traces'")
    if len(traces) > MAX_DEVICES:
        raise Malformed(f"it has more than {MAX_DEVICES} devices")
    tables = [_table(_sequence(trace, "a trace"), shared) for trace in traces]
    by_device: dict[int, list[Mapping[str, Any]]] = {device: [] for device in range(len(tables))}
    for segment in segments:
        by_device.setdefault(_count(segment, "device", 0), []).append(segment)
    # Bounded before objects are made of them: a block takes some hundred bytes here.
    if sum(len(_sequence(segment.get("blocks", ()), "'blocks'")) for segment in segments) > _MAX_BLOCKS:
        raise Malformed(f"it has more than {_MAX_BLOCKS} blocks")
    # A segment can belong to a device without a trace, and the reverse: traces are per device, segments say theirs.
    if not by_device:
        raise Malformed("there is no device in it")
    devices = [
        _device(device, tables[device] if device < len(tables) else EventTable(shared), by_device[device])
        for device in sorted(by_device)
    ]
    return Recording(
        path=name,
        settings=_settings(_mapping(whole.get("allocator_settings", {}), "'allocator_settings'")),
        devices=tuple(devices),
        stacks=shared.stacks.all(),
        notes=shared.notes.all(),
        annotations=_annotations(whole.get("external_annotations", ())),
        extra=None if whole.get("tightfit") is None else _plain(_mapping(whole["tightfit"], "'tightfit'"), {}),
    )


def _as_snapshot(value: Any) -> Any:
    """The snapshot around the bare list of segments that `torch.cuda.memory_snapshot()` returns."""
    is_list = type(value) is EventList and value.table is None
    are_segments = is_list and value and all(type(one) is dict and "total_size" in one for one in value)
    return {"segments": value} if are_segments else value


def _table(trace: Sequence[Any], shared: Shared) -> EventTable:
    return trace.table if type(trace) is EventList and trace.table is not None else table_of(trace, shared)


def _device(device: int, table: EventTable, segments: Sequence[Mapping[str, Any]]) -> DeviceRecording:
    found = sorted((_segment(segment, table) for segment in segments), key=lambda segment: segment.address)
    ends = [segment.address + segment.num_bytes for segment in found]
    # Rebuilding the start of the recording bisects by address, which overlapping segments would break.
    if any(end > following.address for end, following in zip(ends, found[1:], strict=False)):
        raise Malformed("segments overlap")
    at_end = frozenset(
        block.address for segment in found for block in segment.blocks if block.is_live or block.is_waiting
    )
    columns, free_bytes_at_oom = completed(table.columns(), table.free_bytes_at_oom, at_end if found else None)
    return DeviceRecording(device=device, segments=tuple(found), free_bytes_at_oom=free_bytes_at_oom, **columns)


def _segment(segment: Mapping[str, Any], table: EventTable) -> RecordedSegment:
    address, num_bytes = _count(segment, "address"), _count(segment, "total_size")
    blocks = []
    at = address
    for entry in _sequence(segment.get("blocks", ()), "'blocks'"):
        block = _mapping(entry, "a block")
        size = _count(block, "size")
        state = block.get("state")
        blocks.append(
            RecordedBlock(
                address=at,
                num_bytes=size,
                requested_bytes=_count(block, "requested_size", size),
                is_live=state == "active_allocated",
                # torch/cuda/memory.py documents active_awaiting_free, torch/csrc/cuda/Module.cpp writes active_pending_free.
                is_waiting=state in ("active_awaiting_free", "active_pending_free"),
                stack=table.shared.stack(_frames(block)),
            )
        )
        at += size
    # torch lists free blocks too, so a gap means a damaged file.
    if at != address + num_bytes:
        raise Malformed(f"the blocks of the segment at {address:#x} do not fill it")
    return RecordedSegment(
        address=address,
        num_bytes=num_bytes,
        lane=table.lanes.of(_count(segment, "stream", 0), segment.get("segment_pool_id", DEFAULT_POOL)),
        is_small=segment.get("segment_type") == "small",
        is_expandable=segment.get("is_expandable") is True,
        blocks=tuple(blocks),
    )


def _frames(block: Mapping[str, Any]) -> Any:
    """The frames of a block; torch up to 2.0 wrote them into a history of its allocations, as `_memory_viz` reads it."""
    if "frames" in block or not block.get("history"):
        return block.get("frames", ())
    return _mapping(_sequence(block["history"], "'history'")[0], "a block's history").get("frames", ())


def _annotations(recorded: Any) -> tuple[Annotation, ...]:
    return tuple(
        Annotation(
            stage=_text(entry, "stage"),
            name=_text(entry, "name"),
            device=_count(entry, "device", 0),
            time_us=_count(entry, "time_us", 0),
        )
        for entry in (_mapping(entry, "an annotation") for entry in _sequence(recorded, "'external_annotations'"))
    )


def _plain(value: Any, known: dict[int, Any], depth: int = 0) -> Any:
    """A copy of `value` with plain lists; objects that occur twice stay shared."""
    if type(value) not in (dict, tuple, EventList):
        if type(value) in (Stack, EventRow, Frame):
            raise Malformed("there are events or stacks under 'tightfit'")
        return value
    if id(value) in known:
        return known[id(value)]
    if depth > _DEEPEST or (type(value) is EventList and value.table is not None):
        raise Malformed("what is under 'tightfit' is nested too deeply, or holds events")
    if type(value) is dict:
        copied = known[id(value)] = {}
        copied.update((key, _plain(inner, known, depth + 1)) for key, inner in value.items())
        return copied
    listed = known[id(value)] = []
    listed.extend(_plain(inner, known, depth + 1) for inner in value)
    return listed


_MOST_SETTINGS = 1 << 12


def _readable(text: str) -> AllocatorSettings:
    """The settings of a text without those that this version refuses: neither a key of a newer torch nor a pair that is harmful hides the others."""
    settings, kept = AllocatorSettings(), []
    # At the commas that are not in a list. A forged text can be of any length, and both this and the parts take the square of it.
    for part in re.split(r",(?![^\[]*\])", text[:_MOST_SETTINGS]):
        with contextlib.suppress(UsageError):
            settings = AllocatorSettings.parse(",".join((*kept, part)))
            kept.append(part)
    return settings


def _settings(recorded: Mapping[str, Any]) -> AllocatorSettings:
    """The settings that were in force; those that the recording does not list as figures come from its text, if this version can read it."""
    text = recorded.get("PYTORCH_CUDA_ALLOC_CONF")
    settings = _readable(text) if type(text) is str else AllocatorSettings()
    changes: dict[str, Any] = {}
    max_split = recorded.get("max_split_size")
    if type(max_split) is int:
        # No limit is SIZE_MAX in torch, which its snapshot shows as -1.
        changes["max_split_size_bytes"] = max_split if 0 < max_split <= MOST else None
    threshold = recorded.get("garbage_collection_threshold")
    if type(threshold) is float and 0.0 <= threshold < 1.0:
        changes["garbage_collection_threshold"] = threshold
    if type(recorded.get("expandable_segments")) is bool:
        changes["expandable_segments"] = recorded["expandable_segments"]
    divisions = recorded.get("roundup_power2_divisions")
    if type(divisions) is dict:
        counts = [divisions.get(str(1 << power), 0) for power in range(NUM_INTERVALS)]
        if all(type(count) is int and 0 <= count < 1 << 16 and count.bit_count() <= 1 for count in counts):
            changes["roundup_power2_divisions"] = tuple(counts)
    return dataclasses.replace(settings, **changes)
