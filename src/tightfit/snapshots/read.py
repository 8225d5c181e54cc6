"""Reads the recordings that `torch.cuda.memory._dump_snapshot` writes: allocator events, and the segments at the end.

The file is a pickle of plain containers, and from a stranger, so it goes through `plain_pickle` and every figure is checked for its type
and range. Whatever is wrong becomes one `RecordingError` line.
"""

import dataclasses
import enum
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tightfit.errors import RecordingError, UsageError
from tightfit.simulate.settings import NUM_INTERVALS, AllocatorSettings
from tightfit.snapshots import plain_pickle

Column = npt.NDArray[np.int64]

_MOST = (1 << 63) - 1
_DEFAULT_POOL = (0, 0)


class Action(enum.IntEnum):
    """What an event says; `OTHER` is all that concerns no memory."""

    ALLOC = 0
    FREE_REQUESTED = 1
    FREE_COMPLETED = 2
    SEGMENT_ALLOC = 3
    SEGMENT_FREE = 4
    SEGMENT_MAP = 5
    SEGMENT_UNMAP = 6
    OOM = 7
    OTHER = 8


_ACTIONS = {action.name.lower(): action for action in Action}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecordedBlock:
    """A block at the end of the recording. `is_waiting`: freed, while another stream still used it."""

    address: int
    num_bytes: int
    requested_bytes: int
    is_live: bool
    is_waiting: bool


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

    `num_bytes` of an allocation is what was requested, not what it was rounded to. `lane` says which pools serve the event: the stream
    for the default memory pool, and a negative number of its own for each stream of a private one (CUDA graphs, `MemPool`).
    """

    device: int
    action: Column
    address: Column
    num_bytes: Column
    lane: Column
    time_us: Column
    segments: tuple[RecordedSegment, ...]

    @property
    def num_events(self) -> int:
        """How many events were recorded."""
        return len(self.action)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A whole recording. `settings` are those of the allocator that was recorded."""

    path: str
    settings: AllocatorSettings
    devices: tuple[DeviceRecording, ...]


def read_recording(path: str | os.PathLike[str]) -> Recording:
    """The recording in the file at `path`.

    Raises:
        RecordingError: the file cannot be read, or is no recording of torch's CUDA allocator.
    """
    name = os.fspath(path)
    try:
        value = plain_pickle.loads(Path(path).read_bytes())
    except OSError as error:
        raise RecordingError(f"{name} cannot be read: {error.strerror or error}") from error
    except plain_pickle.NotPlain as error:
        raise RecordingError(f"{name} is not a memory recording that can be read: {error}") from error
    try:
        return _recording(name, value)
    except _Malformed as error:
        raise RecordingError(f"{name} is not a recording of torch's memory allocator: {error}") from error


class _Malformed(ValueError):
    """Something is not as a recording has it."""


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if type(value) is not dict:
        raise _Malformed(f"{where} is no dict")
    return value


def _sequence(value: Any, where: str) -> Sequence[Any]:
    if type(value) is not list and type(value) is not tuple:
        raise _Malformed(f"{where} is no list")
    return value


def _count(table: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = table.get(key, default)
    if type(value) is not int or not 0 <= value <= _MOST:
        raise _Malformed(f"'{key}' is missing or no whole number from 0 to 2**63 - 1")
    return value


def _recording(name: str, value: Any) -> Recording:
    whole = _mapping(value, "the whole")
    if "segments" not in whole or "device_traces" not in whole:
        raise _Malformed("it lacks 'segments' or 'device_traces'")
    segments = [_mapping(s, "a segment") for s in _sequence(whole["segments"], "'segments'")]
    traces = [_sequence(t, "a trace") for t in _sequence(whole["device_traces"], "'device_traces'")]
    by_device: dict[int, list[Mapping[str, Any]]] = {device: [] for device in range(len(traces))}
    for segment in segments:
        by_device.setdefault(_count(segment, "device", 0), []).append(segment)
    return Recording(
        path=name,
        settings=_settings(_mapping(whole.get("allocator_settings", {}), "'allocator_settings'")),
        devices=tuple(
            _device(device, traces[device] if device < len(traces) else (), by_device[device])
            for device in sorted(by_device)
        ),
    )


class _Lanes:
    """Numbers for pairs of a stream and a private pool."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, tuple[int, int]], int] = {}

    def of(self, stream: int, pool_id: Any) -> int:
        """The lane of a stream in a pool."""
        pair = _sequence(pool_id, "a pool's id")
        if len(pair) != 2 or not all(type(part) is int for part in pair):
            raise _Malformed("a pool's id is no pair of whole numbers")
        key = (pair[0], pair[1])
        return stream if key == _DEFAULT_POOL else self._numbers.setdefault((stream, key), -1 - len(self._numbers))


def _device(device: int, trace: Sequence[Any], segments: Sequence[Mapping[str, Any]]) -> DeviceRecording:
    lanes = _Lanes()
    found = sorted((_segment(segment, lanes) for segment in segments), key=lambda segment: segment.address)
    ends = [segment.address + segment.num_bytes for segment in found]
    if any(end > following.address for end, following in zip(ends, found[1:], strict=False)):
        raise _Malformed("segments overlap")
    rows = []
    for entry in trace:
        event = _mapping(entry, "an event")
        action = _ACTIONS.get(event["action"], Action.OTHER) if type(event.get("action")) is str else None
        if action is None:
            raise _Malformed("an event has no 'action'")
        address = 0 if action in (Action.OOM, Action.OTHER) else _count(event, "addr")
        lane = lanes.of(_count(event, "stream", 0), event.get("pool_id", _DEFAULT_POOL))
        time_us = _count(event, "time_us", 0)
        rows.append((action.value, address, _count(event, "size", 0), lane, time_us))
    columns = np.asarray(rows, dtype=np.int64).reshape(-1, 5).T
    action, address, num_bytes, lane, time_us = (np.ascontiguousarray(column) for column in columns)
    return DeviceRecording(
        device=device,
        action=action,
        address=address,
        num_bytes=num_bytes,
        lane=lane,
        time_us=time_us,
        segments=tuple(found),
    )


def _segment(segment: Mapping[str, Any], lanes: _Lanes) -> RecordedSegment:
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
                is_waiting=state in ("active_awaiting_free", "active_pending_free"),
            )
        )
        at += size
    if at != address + num_bytes:
        raise _Malformed(f"the blocks of the segment at {address:#x} do not fill it")
    return RecordedSegment(
        address=address,
        num_bytes=num_bytes,
        lane=lanes.of(_count(segment, "stream", 0), segment.get("segment_pool_id", _DEFAULT_POOL)),
        is_small=segment.get("segment_type") == "small",
        is_expandable=segment.get("is_expandable") is True,
        blocks=tuple(blocks),
    )


def _settings(recorded: Mapping[str, Any]) -> AllocatorSettings:
    """The figures as they were in force; what has no figure of its own comes from the text, where this version can read it."""
    text = recorded.get("PYTORCH_CUDA_ALLOC_CONF")
    try:
        settings = AllocatorSettings.parse(text) if type(text) is str else AllocatorSettings()
    except UsageError:
        settings = AllocatorSettings()
    changes: dict[str, Any] = {}
    max_split = recorded.get("max_split_size")
    if type(max_split) is int:
        changes["max_split_size_bytes"] = max_split if 0 < max_split <= _MOST else None
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
