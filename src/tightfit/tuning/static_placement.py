"""A static placement of the blocks of a recording, one arena per stream: the memory needed if every lifetime were known in advance.

Blocks that are allocated throughout are placed first: removing one lowers any placement by exactly its size, so nothing is lost. The rest is
placed greedily in several orders, and small arenas go to the search of `tightfit.placement`.
"""

import dataclasses
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tightfit.allocator.pools import MIN_BLOCK_BYTES
from tightfit.placement.buffers import Buffer, PlacementProblem
from tightfit.placement.strategies import solve
from tightfit.tuning.program import Lifetime, Program

Numbers = npt.NDArray[np.int64]

_MAX_BLOCKS = 20_000
"""Of one arena; beyond that only the time around its peak is placed."""
_MAX_SEARCHED = 600
"""The largest problem for the exact search, whose memory and time grow with the square of the number of blocks."""

_NUM_VAIN_REPAIRS = 20
"""The number of repairs without improvement after which the search for better orders stops."""
_EARLIER = 0.15
"""How far a block that ends above the bound moves forward in the order, as a part of the number of blocks."""
_CLOSE = 1.001
"""A placement within this factor of the bound is not improved any further."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StaticPlacement:
    """The sum of the heights of the arenas, in bytes, and its lower bound, the sum of their peaks of live bytes.

    `num_placed` of `num_blocks` blocks were placed: only those near the peak where there are too many. `is_optimal`: no lower height exists.
    """

    height_bytes: int
    bound_bytes: int
    is_optimal: bool
    num_placed: int
    num_blocks: int


def place_statically(programs: Sequence[Program], *, seconds: float) -> StaticPlacement:
    """Addresses for the blocks of each device and stream, found in about `seconds`."""
    arenas: dict[tuple[int, int], list[Lifetime]] = {}
    for program in programs:
        for lifetime in program.lifetimes():
            if lifetime.num_bytes and lifetime.lower < lifetime.upper:
                arenas.setdefault((program.device, lifetime.lane), []).append(lifetime)
    deadline = time.monotonic() + seconds
    placed = [_place(arena, deadline) for arena in arenas.values()]
    return StaticPlacement(
        height_bytes=sum(one.height_bytes for one in placed),
        bound_bytes=sum(one.bound_bytes for one in placed),
        is_optimal=all(one.is_optimal for one in placed),
        num_placed=sum(one.num_placed for one in placed),
        num_blocks=sum(one.num_blocks for one in placed),
    )


def _place(arena: list[Lifetime], deadline: float) -> StaticPlacement:
    floor_bytes = sum(block.num_bytes for block in arena if block.is_whole)
    moving = [block for block in arena if not block.is_whole]
    near = _near_peak(moving)
    lower, upper, size = _columns(near)
    # The peak of live bytes bounds the height of any placement from below.
    bound_bytes = _crowd(lower, upper, size)[1]
    height_bytes = _greedy_height(lower, upper, size, bound_bytes, deadline)
    is_optimal = height_bytes == bound_bytes
    if not is_optimal and len(near) <= _MAX_SEARCHED:
        buffers = tuple(
            # Sizes are multiples of 512, so placing in these units keeps every address aligned.
            Buffer(name=str(at), lower=block.lower, upper=block.upper, size=block.num_bytes // MIN_BLOCK_BYTES)
            for at, block in enumerate(near)
        )
        solution = solve(PlacementProblem(buffers=buffers), seconds=max(0.0, deadline - time.monotonic()))
        height_bytes = min(height_bytes, solution.height * MIN_BLOCK_BYTES)
        is_optimal = solution.is_proven_optimal
    return StaticPlacement(
        height_bytes=floor_bytes + height_bytes,
        bound_bytes=floor_bytes + bound_bytes,
        is_optimal=is_optimal,
        num_placed=len(near) + len(arena) - len(moving),
        num_blocks=len(arena),
    )


def _near_peak(blocks: list[Lifetime]) -> list[Lifetime]:
    """The blocks whose lifetimes are nearest to the peak, as many as can be placed."""
    if len(blocks) <= _MAX_BLOCKS:
        return blocks
    lower, upper, size = _columns(blocks)
    moment = _crowd(lower, upper, size)[0]
    distance = np.maximum(np.maximum(lower - moment, moment - upper + 1), 0)
    order = np.argsort(distance, kind="stable")
    furthest = distance[order[_MAX_BLOCKS]]
    return [blocks[at] for at in order if distance[at] < furthest]


def _columns(blocks: list[Lifetime]) -> tuple[Numbers, Numbers, Numbers]:
    """Begins, ends and bytes."""
    rows = [(block.lower, block.upper, block.num_bytes) for block in blocks]
    lower, upper, size = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    return lower, upper, size


def _crowd(lower: Numbers, upper: Numbers, size: Numbers) -> tuple[int, int]:
    """The time of the peak of live bytes, and those bytes."""
    moments = np.concatenate((lower, upper))
    changes = np.concatenate((size, -size))
    # At the same time ends come before begins: lifetimes are half-open, and an end has a negative change.
    order = np.lexsort((changes, moments))
    live = np.cumsum(changes[order])
    at = int(np.argmax(live)) if len(live) else 0
    return (int(moments[order[at]]), int(live[at])) if len(live) else (0, 0)


def _greedy_height(lower: Numbers, upper: Numbers, size: Numbers, bound_bytes: int, deadline: float) -> int:
    """The lowest of several greedy placements; the first is always made, the others while there is time.

    The best order is then repaired: blocks that reach above the bound come earlier, and all are placed again (squeaky wheel optimisation,
    Joslin and Clements, 1999).
    """
    if not len(size):
        return 0
    orders = (
        np.lexsort((lower, -size)),
        np.lexsort((lower, -size * (upper - lower))),
        np.lexsort((-size, lower - upper)),
        np.lexsort((-size, lower)),
    )
    # The first order, largest first, is placed in any case; the others while there is time.
    order, ends = orders[0], _first_fit(lower[orders[0]], upper[orders[0]], size[orders[0]])
    for other in orders[1:]:
        if ends.max() <= _CLOSE * bound_bytes or time.monotonic() > deadline:
            break
        other_ends = _first_fit(lower[other], upper[other], size[other])
        if other_ends.max() < ends.max():
            order, ends = other, other_ends
    best_bytes, num_vain = int(ends.max()), 0
    ranks = np.empty(len(order))
    while num_vain < _NUM_VAIN_REPAIRS and best_bytes > _CLOSE * bound_bytes and time.monotonic() < deadline:
        ranks[order] = np.arange(len(order))
        # Blocks above the bound are in the way of nothing but the result, so they get a better place next time.
        ranks[order[ends > bound_bytes]] -= _EARLIER * len(order)
        order = np.argsort(ranks, kind="stable")
        ends = _first_fit(lower[order], upper[order], size[order])
        num_vain = 0 if ends.max() < best_bytes else num_vain + 1
        best_bytes = min(best_bytes, int(ends.max()))
    return best_bytes


def _first_fit(lower: Numbers, upper: Numbers, size: Numbers) -> Numbers:
    """The end of each block when they are put one by one into the lowest gap that holds them (first fit)."""
    begins = np.zeros_like(size)
    ends = np.zeros_like(size)
    for at in range(len(size)):
        meets = np.flatnonzero((lower[:at] < upper[at]) & (lower[at] < upper[:at]))
        meets = meets[np.argsort(begins[meets])]
        # The gap before a block reaches from the highest end of all below it to its begin.
        tops = np.concatenate(([0], np.maximum.accumulate(ends[meets])))
        holding = np.flatnonzero(begins[meets] - tops[:-1] >= size[at])
        begins[at] = tops[holding[0]] if len(holding) else tops[-1]
        ends[at] = begins[at] + size[at]
    return ends
