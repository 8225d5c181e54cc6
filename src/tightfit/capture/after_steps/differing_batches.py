"""Whether the batches of the traced steps differ in size: a later one may then be larger than all that were seen, and need more memory.

A batch is what is copied from host memory to the GPU, outside of all modules, between the last backward passes of two steps. Steps are compared with
those that have as many backward passes: one of fewer micro-batches is no smaller batch.
"""

import itertools

from tightfit.capture.observe.recorder import Recorder
from tightfit.capture.patches.loading import loaders
from tightfit.tape import Category, Phase, SpanKind
from tightfit.units import format_bytes


def told_of_batches(recorder: Recorder) -> str:
    """What is to be said where the batches of the traced steps differ in size; empty where they do not, or where no step has one."""
    for sizes in _bytes_of_batches(recorder):
        # A few bytes more are an index or a count.
        if max(sizes) >= 1.01 * min(sizes):
            looks = "--largest-batch looks for it, " if loaders.num_examples else ""
            return (
                f"batches differ in size from step to step: those of the traced steps have {format_bytes(min(sizes))} to {format_bytes(max(sizes))}; "
                f"a larger one needs more memory ({looks}--steps N traces more)"
            )
    return ""


def _bytes_of_batches(recorder: Recorder) -> list[list[int]]:
    """The sizes of the batches that can be compared with each other, but for those of 0 bytes."""
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

    def size(after: int, until: int) -> int:
        return sum(num_bytes for operator, num_bytes in inputs if after < operator <= until)

    by_passes: dict[int, list[int]] = {}
    for after, until in itertools.pairwise(last_of_steps):
        by_passes.setdefault(sum(after < n <= until for n in passes), []).append(size(after, until))
    # The step that follows has loaded its batch, or a part of it.
    following = size(last_of_steps[-1], recorder.num_operators)
    groups = [[size for size in sizes if size] for sizes in by_passes.values()]
    return [[*sizes, following] if following > max(sizes) else sizes for sizes in groups if sizes]
