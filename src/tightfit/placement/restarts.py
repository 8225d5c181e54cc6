"""The search with restarts: many short runs in different orders instead of one long run that is lost in its first wrong choice.

The first runs follow four orders and choose by conflict sets alone, which solves problems with slack quickly. Later ones choose by sections too, in
the same orders and then slightly shuffled ones; they share the weights of the sections, which show where the search fails. The runs grow slowly, so
infeasibility is still proven in the end.
"""

import time
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from tightfit.placement.board import Board, Numbers
from tightfit.placement.branch_and_bound import BranchAndBound, Outcome

# Short, so that a run that began badly is soon tried in another order; later runs grow by _GROWTH.
_FIRST_NODES = 400
_GROWTH = 1.3
_FORGET = 0.7
"""The part of a section's weight that carries over to the next run; without decay, the failures of the first runs dominate all later ones."""
_SHUFFLE = 0.04
"""The standard deviation of a shuffled rank, as a part of the number of buffers."""


def _lifetime(board: Board) -> tuple[Numbers, ...]:
    return board.upper - board.lower, board.sizes


def _sections(board: Board) -> tuple[Numbers, ...]:
    return board.members.sum(axis=0), board.sizes


def _area(board: Board) -> tuple[Numbers, ...]:
    return ((board.upper - board.lower) * board.sizes,)


def _crowd(board: Board) -> tuple[Numbers, ...]:
    crowds = np.where(board.members, board.member_sizes.sum(axis=1)[:, None], 0).max(axis=0)
    return crowds, (board.upper - board.lower) * board.sizes


PRIORITIES: Mapping[str, Callable[[Board], tuple[Numbers, ...]]] = {
    # A long-lived buffer low down leaves a flat floor; one high up leaves a cave below.
    "lifetime": _lifetime,
    # The same where the clock says little, as it counts bytes or operators.
    "sections": _sections,
    # What is hard to place comes while there is still room.
    "area": _area,
    # The fullest moments decide whether it fits.
    "crowd": _crowd,
}


def place_below(board: Board, height: int, *, deadline: float) -> tuple[Outcome, Numbers]:
    """Offsets in units below `height`, where there are any and `deadline` (of `time.monotonic`) leaves time to find them; deterministic but for the deadline."""
    orders = [_ranks(priority(board)) for priority in PRIORITIES.values()]
    for ranks in orders:
        search = BranchAndBound(
            board,
            height,
            ranks=ranks,
            weights=np.ones(len(board.members)),
            uses_sections=False,
            num_nodes=_FIRST_NODES,
            deadline=deadline,
        )
        outcome = search.run()
        if outcome is not Outcome.STOPPED:
            return outcome, search.offsets
    return _shuffled_runs(board, height, orders, deadline)


def _shuffled_runs(
    board: Board, height: int, orders: list[npt.NDArray[np.intp]], deadline: float
) -> tuple[Outcome, Numbers]:
    # A fixed seed: the same problem gives the same placement, apart from the deadline.
    random = np.random.default_rng(0)
    weights = np.ones(len(board.members))
    num_nodes, num_runs = float(_FIRST_NODES), 0
    while True:
        ranks = orders[num_runs % len(orders)]
        if num_runs >= len(orders):
            noise = random.normal(0, len(ranks) * _SHUFFLE, len(ranks))
            ranks = np.argsort(np.argsort(ranks + noise))
        search = BranchAndBound(
            board, height, ranks=ranks, weights=weights, uses_sections=True, num_nodes=int(num_nodes), deadline=deadline
        )
        outcome = search.run()
        if outcome is not Outcome.STOPPED or time.monotonic() > deadline:
            return outcome, search.offsets
        # Towards 1, the weight of a section that never failed.
        weights = weights * _FORGET + (1 - _FORGET)
        num_runs += 1
        if num_runs % len(orders) == 0:
            num_nodes *= _GROWTH


def _ranks(keys: tuple[Numbers, ...]) -> npt.NDArray[np.intp]:
    """The rank of each buffer when sorted by the keys, largest first; the first key is the primary one."""
    return np.argsort(np.lexsort([-key for key in reversed(keys)]))
