"""Tells segments that the program freed with `empty_cache` from those that the allocator freed to serve a request.

A recording shows both as freed segments. What a request made the allocator do (garbage collection, freeing oversize blocks or the whole cache
before a retry) applies to that GPU and those settings only, so a replay with others decides anew.
"""

import dataclasses

import numpy as np

from tightfit.allocator.settings import AllocatorSettings
from tightfit.recordings.read import Action, DeviceRecording

_RETURNS = (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP)
_ANSWERS = (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP, Action.OOM)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Return:
    """Consecutive events `[begin, end)` that freed segments or unmapped pages; `is_by_request`: to serve a request."""

    begin: int
    end: int
    is_by_request: bool


def returns_of(recording: DeviceRecording, settings: AllocatorSettings) -> list[Return]:
    """The segments and pages freed to the driver during `recording`, which ran with `settings`.

    The allocator writes the stack of a request on all that it does for it (`context` in CUDACachingAllocator.cpp, torch 2.13), so the new
    segment, or the failure, that follows has the same stack. Without stacks a return right before a new segment counts as the program's,
    unless the settings let the allocator give back a part of what it holds.
    """
    is_return = np.isin(recording.action, _RETURNS)
    # Completed frees are skipped: emptying the cache first waits for all streams, which completes pending frees in between.
    others = (~(is_return | (recording.action == Action.FREE_COMPLETED))).nonzero()[0]
    found: list[Return] = []
    begin = end = -1
    for at in [*is_return.nonzero()[0].tolist(), recording.num_events + 1]:
        if at != end:
            if end > begin:
                following = others[np.searchsorted(others, end) :][:1].tolist()
                is_by_request = bool(following) and _is_by_request(recording, begin, following[0], settings)
                found.append(Return(begin=begin, end=end, is_by_request=is_by_request))
            begin = at
        end = at + 1
    return found


def _is_by_request(recording: DeviceRecording, begin: int, following: int, settings: AllocatorSettings) -> bool:
    if recording.action[following] not in _ANSWERS:
        return False
    stack, asking = int(recording.stack[begin]), int(recording.stack[following])
    # Equal stacks mean the same call: torch notes the context of the request for all that it triggers.
    if stack or asking:
        return stack == asking
    return settings.garbage_collection_threshold > 0 or settings.max_split_size_bytes is not None
