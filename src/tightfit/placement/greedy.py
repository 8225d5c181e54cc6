"""Five greedy planners: take the buffers in an order and put each into the lowest gap that holds it.

They take milliseconds and give the first placement, which a search then has to beat. The orders are those that planners in use sort by: size
(TensorFlow Lite and ONNX Runtime), area, lifetime, begin of the lifetime (an allocator without foresight) and its end.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tightfit.placement.buffers import Buffer, PlacementProblem

Key = Callable[[Buffer], tuple[int, ...]]

ORDERS: Mapping[str, Key] = {
    "size": lambda buffer: (-buffer.size, buffer.lower),
    "area": lambda buffer: (-buffer.size * (buffer.upper - buffer.lower), buffer.lower),
    "lifetime": lambda buffer: (buffer.lower - buffer.upper, -buffer.size),
    "birth": lambda buffer: (buffer.lower, -buffer.size),
    "death": lambda buffer: (-buffer.upper, -buffer.size),
}


def place_in_order(buffers: Sequence[Buffer], alignment: int) -> dict[str, int]:
    """Offsets in bytes of the buffers, each put into the lowest gap between earlier ones whose lifetimes overlap its own."""
    # Ranks in place of times, which are integers of any size.
    moments = {moment: rank for rank, moment in enumerate(sorted({m for b in buffers for m in (b.lower, b.upper)}))}
    most_bytes = sum(buffer.size + alignment for buffer in buffers)
    # By begin address; row by row: begin, end rounded up to the alignment, and the lifetime.
    placed = np.zeros((4, len(buffers)), dtype=np.int64 if most_bytes < 1 << 62 else object)
    offsets: dict[str, int] = {}
    num_placed = 0
    for buffer in buffers:
        lower, upper = moments[buffer.lower], moments[buffer.upper]
        begins, ends, lowers, uppers = placed[:, :num_placed]
        meets = np.flatnonzero((lowers < upper) & (lower < uppers))
        # Below each of those that are live with it: the highest end of those before.
        tops = np.concatenate(([0], np.maximum.accumulate(ends[meets])))
        is_gap = tops[:-1] + buffer.size <= begins[meets]
        offset = int(tops[is_gap.argmax() if is_gap.any() else -1])
        offsets[buffer.name] = offset
        # A buffer of 0 bytes overlaps nothing.
        if buffer.size:
            end = offset + buffer.size
            at = int(np.searchsorted(begins, offset))
            placed[:, at + 1 : num_placed + 1] = placed[:, at:num_placed]
            placed[:, at] = offset, end + -end % alignment, lower, upper
            num_placed += 1
    return offsets


def greedy(problem: PlacementProblem, order: str) -> dict[str, int]:
    """Offsets in bytes by the order of that name in `ORDERS`."""
    return place_in_order(sorted(problem.buffers, key=ORDERS[order]), problem.alignment)
