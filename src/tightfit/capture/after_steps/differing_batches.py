"""Whether the batches of the traced steps differ in size: a later one may then be larger than all that were seen, and need more memory.

A batch is what is copied from host memory to the GPU, outside of all modules, between the last backward passes of two steps. Steps are compared with
those that have as many backward passes: one of fewer micro-batches is no smaller batch.
"""

import itertools
from typing import NamedTuple

from tightfit.capture.observe.recorder import Recorder
from tightfit.capture.patches.loading import loaders
from tightfit.tape import Category, Phase, SpanKind
from tightfit.units import format_bytes

# A few bytes more are an index or a count.
_LARGER = 1.01
_MIN_SORTED = 3


def told_of_batches(recorder: Recorder) -> str:
    """What is to be said where the batches of the traced steps differ in size; empty where they do not, or where no step has one."""
    for batches in _batches(recorder):
        first, last = min(batches), max(batches)
        if last.distinct_bytes >= _LARGER * first.distinct_bytes:
            low, high = sorted((first.num_bytes, last.num_bytes))
            looks = "--largest-batch looks for it, " if loaders.num_examples else ""
            return (
                f"batches differ in size from step to step: those of the traced steps have {format_bytes(low)} to {format_bytes(high)}; "
                f"a larger one needs more memory ({looks}--steps N traces more)"
            )
    return ""


def growing_batches(recorder: Recorder) -> str:
    """In words, the sizes of the batches of the traced steps where each has a larger one than the step before: examples that are sorted by their length."""
    for batches in _batches(recorder):
        is_sorted = all(b.distinct_bytes >= _LARGER * a.distinct_bytes for a, b in itertools.pairwise(batches))
        if len(batches) >= _MIN_SORTED and is_sorted:
            # A step of fewer, larger tensors has fewer bytes in all.
            low, high = sorted((batches[0].num_bytes, batches[-1].num_bytes))
            return f"those of the traced steps grow from {format_bytes(low)} to {format_bytes(high)}"
    return ""


class _Batch(NamedTuple):
    """What a step loads. Tensors of one size count once in `distinct_bytes`, by which batches are compared: a step with an evaluation, or one that loads
    ahead, has more of them, and no larger ones."""

    distinct_bytes: int
    num_bytes: int


def _batches(recorder: Recorder) -> list[list[_Batch]]:
    """The batches that can be compared with each other, but for those of 0 bytes."""
    phases = recorder.operators["phase"]
    begins = [operator for _, _, _, operator in recorder.spans]
    ends = [*begins[1:], recorder.num_operators]
    last_of_steps = []
    passes = [
        n for n, phase in enumerate(phases) if phase == Phase.BACKWARD and (n == 0 or phases[n - 1] != Phase.BACKWARD)
    ]
    for (_, kind, *_), begin, end in zip(recorder.spans, begins, ends, strict=True):
        if kind == SpanKind.STEP:
            last_of_steps.append(max((n for n in passes if begin <= n < end), default=end - 1))
    if not last_of_steps:
        return []
    storages = recorder.storages
    inputs = [
        (operator, num_bytes)
        for operator, num_bytes, category in zip(
            storages["operator"], storages["num_bytes"], storages["category"], strict=True
        )
        if category == Category.INPUTS
    ]

    def batch(after: int, until: int) -> _Batch:
        sizes = [num_bytes for operator, num_bytes in inputs if after < operator <= until]
        return _Batch(sum(set(sizes)), sum(sizes))

    by_passes: dict[int, list[_Batch]] = {}
    for after, until in itertools.pairwise(last_of_steps):
        by_passes.setdefault(sum(after < n <= until for n in passes), []).append(batch(after, until))
    # The step that follows has loaded its batch, or a part of it.
    following = batch(last_of_steps[-1], recorder.num_operators)
    groups = [[one for one in batches if one.num_bytes] for batches in by_passes.values()]
    return [[*group, following] if following > max(group) else group for group in groups if group]
