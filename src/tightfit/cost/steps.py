"""Seconds of each step of a tape: the GPU's work, or the time to issue it from the host where that is longer.

Eager torch issues kernels one by one from the host; a GPU that is faster than that waits. Streams are assumed to overlap perfectly, so the
busiest one counts. Waits between streams, and the host's own work between steps (data loading, logging), are not on a tape.
"""

import numpy as np

from tightfit.cost.efficiency import efficiency_of
from tightfit.cost.roofline import is_kernel, operator_seconds
from tightfit.devices.calibration import Calibration
from tightfit.devices.device import Device
from tightfit.tape import SpanKind, Tape


def step_seconds(
    tape: Tape,
    device: Device,
    calibration: Calibration | None = None,
    *,
    tf32_matmul: bool = False,
    tf32_convolution: bool = True,
) -> list[float]:
    """Seconds of each span of kind `STEP`, in order; the options are those of `operator_seconds`."""
    seconds = operator_seconds(tape, device, calibration, tf32_matmul=tf32_matmul, tf32_convolution=tf32_convolution)
    issued = is_kernel(tape) * efficiency_of(device, calibration).issue_seconds
    streams = [tape.operators.stream == stream for stream in np.unique(tape.operators.stream)]
    steps = []
    for begin, end in step_operators(tape):
        busiest = max((float(seconds[begin:end][stream[begin:end]].sum()) for stream in streams), default=0.0)
        steps.append(max(busiest, float(issued[begin:end].sum())))
    return steps


def step_operators(tape: Tape) -> list[tuple[int, int]]:
    """The operators `[begin, end)` of each `STEP` span.

    Spans are ranges of events, and an event knows how many operators were issued before it; operators after the last event belong to the last span.
    """
    # One entry more than there are events, for spans that end with the tape.
    issued_before = np.append(tape.events.operator, len(tape.operators))
    spans = tape.spans
    steps = spans.kind == SpanKind.STEP
    return [
        (int(issued_before[b]), int(issued_before[e]))
        for b, e in zip(spans.begin[steps], spans.end[steps], strict=True)
    ]
