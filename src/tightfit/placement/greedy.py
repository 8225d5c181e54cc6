"""Five greedy planners: take the buffers in an order and put each into the lowest gap that holds it.

They take milliseconds and give the first placement, which a search then has to beat. The orders are those that planners in use sort by: size
(TensorFlow Lite and ONNX Runtime), area, lifetime, begin of the lifetime (an allocator without foresight) and its end.
"""

from collections.abc import Callable, Mapping, Sequence

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
    offsets: dict[str, int] = {}
    placed: list[tuple[int, int, int, int]] = []
    for buffer in buffers:
        offset = 0
        for begin, end, lower, upper in sorted(placed):
            # Sorted by begin address, so the first gap that is large enough is the lowest.
            if lower < buffer.upper and buffer.lower < upper:
                if offset + buffer.size <= begin:
                    break
                offset = max(offset, end + -end % alignment)
        offsets[buffer.name] = offset
        # A buffer of 0 bytes overlaps nothing.
        if buffer.size:
            placed.append((offset, offset + buffer.size, buffer.lower, buffer.upper))
    return offsets


def greedy(problem: PlacementProblem, order: str) -> dict[str, int]:
    """Offsets in bytes by the order of that name in `ORDERS`."""
    return place_in_order(sorted(problem.buffers, key=ORDERS[order]), problem.alignment)
