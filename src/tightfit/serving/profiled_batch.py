"""Memory of the parts of a traced inference: what each step allocates beyond what was there when it began."""

import dataclasses

import numpy as np

from tightfit.allocator.caching import CachingAllocator
from tightfit.allocator.replay_tape import TapeReplay
from tightfit.allocator.settings import AllocatorSettings
from tightfit.tape import EventKind, SpanKind, Tape


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """Peaks of one step in bytes: of tensors, and of the segments that a caching allocator takes for them from an empty cache."""

    allocated_bytes: int
    reserved_bytes: int


def step_memory(tape: Tape, step: int) -> StepMemory:
    """The peaks of the step with that number, of what it allocates itself."""
    spans = tape.spans
    chosen = np.flatnonzero(spans.kind == SpanKind.STEP)[step]
    begin, end = int(spans.begin[chosen]), int(spans.end[chosen])
    replay = TapeReplay(CachingAllocator(AllocatorSettings()))
    sizes, streams = tape.storages.num_bytes.tolist(), tape.storages.stream.tolist()
    own: set[int] = set()
    allocated = reserved = 0
    for at in range(begin, end):
        kind, storage = int(tape.events.kind[at]), int(tape.events.storage[at])
        if kind == EventKind.ALLOCATE:
            own.add(storage)
        if storage not in own or not sizes[storage]:
            continue
        replay.feed(kind, storage, sizes, streams, int(tape.events.value[at]))
        allocated = max(allocated, replay.allocator.allocated_bytes)
        reserved = max(reserved, replay.allocator.reserved_bytes)
    return StepMemory(allocated_bytes=allocated, reserved_bytes=reserved)
