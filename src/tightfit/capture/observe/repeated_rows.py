"""Repeats operators of a tape that is being recorded, with what their time depends on: a call that is answered, and not traced, takes the time of the one it is like."""

import bisect
from collections.abc import Sequence

from tightfit.capture.observe.recorder import Recorder

MAX_ROWS = 300_000
"""The most operators that a tape has when more are repeated."""


def repeat_operators(recorder: Recorder, begin: int, end: int) -> bool:
    """Issues the operators `[begin, end)` again, with their copies and the sizes of their products; whether there was room for them."""
    moved = recorder.num_operators - begin
    if recorder.num_operators + end - begin > MAX_ROWS:
        return False
    for column in recorder.operators.values():
        column.extend(column[begin:end])
    products = recorder.geometry
    first = bisect.bisect_left(products, begin, key=lambda row: row[0])
    recorder.geometry += [(row[0] + moved, *row[1:]) for row in products[first:] if row[0] < end]
    issued: Sequence[int] = recorder.copies["operator"]
    first, last = bisect.bisect_left(issued, begin), bisect.bisect_left(issued, end)
    for name, column in recorder.copies.items():
        column.extend([value + moved if name == "operator" else value for value in column[first:last]])
    recorder.num_operators += end - begin
    return True
