"""The operators of each step of a tape."""

import numpy as np

from tightfit.tape import SpanKind, Tape


def step_operators(tape: Tape) -> list[tuple[int, int]]:
    """The operators `[begin, end)` of each `STEP` span.

    Tapes from before they were recorded have spans of events alone. An event knows how many operators were issued before it, so there an operator without
    an event, or before its own, belongs to the step before; operators after the last event belong to the last span.
    """
    if tape.operators_of_steps:
        return list(tape.operators_of_steps)
    # One entry more than there are events, for spans that end with the tape.
    issued_before = np.append(tape.events.operator, len(tape.operators))
    spans = tape.spans
    steps = spans.kind == SpanKind.STEP
    return [
        (int(issued_before[b]), int(issued_before[e]))
        for b, e in zip(spans.begin[steps], spans.end[steps], strict=True)
    ]
