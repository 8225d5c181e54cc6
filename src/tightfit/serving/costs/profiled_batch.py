"""Memory of the largest batch of an engine in a traced inference: what its forward pass and its sampler allocate beyond what was there before.

A model that loops over tokens in Python is traced with few of them, at two sizes: its peaks are affine in the number of tokens, as its tensors are.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from tightfit.allocator.caching import CachingAllocator
from tightfit.allocator.replay_tape import TapeReplay
from tightfit.allocator.settings import AllocatorSettings
from tightfit.tape import EventKind, SpanKind, Tape


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """Step number `at` of a trace of `tightfit.capture.inference.inference_run`: what it was, its size, and with how many ranks."""

    at: int
    kind: str
    size: int
    ranks: int

    @classmethod
    def of_report(cls, report: Mapping[str, Any], ranks: int) -> list[Self]:
        """The steps with so many ranks."""
        return [
            cls(at=at, kind=kind, size=size, ranks=of_ranks)
            for at, (kind, size, of_ranks) in enumerate(report["steps"])
            if of_ranks == ranks
        ]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """Peaks in bytes: of tensors, and of the segments that a caching allocator takes for them from an empty cache."""

    allocated_bytes: int
    reserved_bytes: int


def batch_memory(tape: Tape, steps: Sequence[TracedStep], num_tokens: int, sampled_rows: int) -> StepMemory:
    """The peaks of the engine's largest batch, of `num_tokens`, of which `sampled_rows` are sampled; both were traced, or the tokens were too many for the model's loops."""
    rows = min(sampled_rows, num_tokens)
    traced = {
        step.size: _of_batch(tape, steps, place, rows) for place, step in enumerate(steps) if step.kind == "batch"
    }
    if num_tokens in traced:
        return _largest(*traced[num_tokens])
    (smaller, less), (size, more) = list(traced.items())[-2:]
    factor = (num_tokens - size) / (size - smaller)
    return _largest(*(_beyond(*pair, factor) for pair in zip(less, more, strict=True)))


def _of_batch(tape: Tape, steps: Sequence[TracedStep], place: int, rows: int) -> tuple[StepMemory, StepMemory]:
    """The peaks of the batch at that place among the steps, and of the sampling of `rows` of it."""
    following = steps[place + 1 :]
    number = next((n for n, step in enumerate(following) if step.kind != "sample"), len(following))
    samplers = following[:number]
    chosen = next((step for step in samplers if step.size >= rows), samplers[-1])
    forward, sampler = peaks(tape, [steps[place].at, chosen.at])
    return forward, sampler


def peaks(tape: Tape, chosen: Sequence[int]) -> list[StepMemory]:
    """The peaks of each of the steps with those numbers, in order, of what they allocate themselves."""
    spans = tape.spans
    of_steps = np.flatnonzero(spans.kind == SpanKind.STEP)[list(chosen)]
    replay = TapeReplay(CachingAllocator(AllocatorSettings()))
    sizes, streams = tape.storages.num_bytes.tolist(), tape.storages.stream.tolist()
    own: set[int] = set()
    found = []
    for at_span in of_steps:
        allocated = reserved = 0
        for at in range(int(spans.begin[at_span]), int(spans.end[at_span])):
            kind, storage = int(tape.events.kind[at]), int(tape.events.storage[at])
            if kind == EventKind.ALLOCATE:
                own.add(storage)
            if storage not in own or not sizes[storage]:
                continue
            replay.feed(kind, storage, sizes, streams, int(tape.events.value[at]))
            allocated = max(allocated, replay.allocator.allocated_bytes)
            reserved = max(reserved, replay.allocator.reserved_bytes)
        found.append(StepMemory(allocated_bytes=allocated, reserved_bytes=reserved))
    return found


def _largest(first: StepMemory, second: StepMemory) -> StepMemory:
    return StepMemory(
        allocated_bytes=max(first.allocated_bytes, second.allocated_bytes),
        reserved_bytes=max(first.reserved_bytes, second.reserved_bytes),
    )


def _beyond(less: StepMemory, more: StepMemory, factor: float) -> StepMemory:
    """As much beyond `more` as `factor` times the way from `less` to it."""
    return StepMemory(
        allocated_bytes=round(more.allocated_bytes + factor * (more.allocated_bytes - less.allocated_bytes)),
        reserved_bytes=round(more.reserved_bytes + factor * (more.reserved_bytes - less.reserved_bytes)),
    )
