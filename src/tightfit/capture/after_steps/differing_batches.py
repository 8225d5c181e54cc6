"""Whether the batches of the traced steps differ in size: a later one may then be larger than all that were seen, and need more memory.

A batch is what a step copies from host memory to the GPU outside of all modules.
"""

from tightfit.capture.observe.recorder import Recorder
from tightfit.tape import Category, SpanKind
from tightfit.units import format_bytes


def told_of_batches(recorder: Recorder) -> str:
    """What is to be said where the batches of the traced steps differ in size; empty where they do not, or where no step has one."""
    sizes = [size for size in _bytes_of_batches(recorder) if size]
    # A few bytes more are an index or a count.
    if not sizes or max(sizes) < 1.01 * min(sizes):
        return ""
    return (
        f"batches differ in size from step to step: those of the traced steps have {format_bytes(min(sizes))} to {format_bytes(max(sizes))}; "
        "a larger one needs more memory (--largest-batch looks for it, --steps N traces more)"
    )


def _bytes_of_batches(recorder: Recorder) -> list[int]:
    begins = [operator for _, _, _, operator in recorder.spans]
    ends = [*begins[1:], recorder.num_operators]
    steps = [
        range(begin, end)
        for (_, kind, *_), begin, end in zip(recorder.spans, begins, ends, strict=True)
        if kind == SpanKind.STEP
    ]
    storages = recorder.storages
    inputs = [
        (operator, num_bytes)
        for operator, num_bytes, category in zip(
            storages["operator"], storages["num_bytes"], storages["category"], strict=True
        )
        if category == Category.INPUTS
    ]
    return [sum(num_bytes for operator, num_bytes in inputs if operator in step) for step in steps]
