"""Branch and bound over left-justified placements: does everything fit below a given height?

Stacking buffers is scheduling: an offset is a start time, a size a duration, each section a machine that runs one job at a time, and a buffer needs
all of its sections at once. Three ideas make the search effective:

* conflict sets (Giffler and Thompson, 1960): of the buffers that could be placed below the top of another, one must be placed exactly at its lowest
  possible offset; nothing else need be tried;
* next in a section: where a section has little slack, few of its buffers can come next in it;
* conflict-directed restarts (weighted degrees: Boussemart et al., 2004): sections that fail gain weight, and the next run begins with them.

Groups of buffers whose lifetimes do not overlap are solved independently, as in MiniMalloc (Moffitt, ASPLOS 2023). A run that is exhausted proves
that nothing fits.
"""

import dataclasses
import enum
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from tightfit.placement.board import FAR, Board, Flags, Numbers

_FRAMES_PER_BUFFER = 4
# A set of one buffer leaves no choice, so it costs nothing to take it first.
_FORCED = 1
_NOT_A_CHOICE = 1e18
_LOWEST_FIRST = 1e-19
"""Breaks ties between choices of equal score: too small to outweigh a difference, for heights up to FAR."""


class Outcome(enum.Enum):
    """How a run ended: with a placement, with the proof that there is none, or at a limit."""

    FOUND = enum.auto()
    EXHAUSTED = enum.auto()
    STOPPED = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True)
class PartialPlacement:
    """A partial placement.

    `starts` (n): the lowest possible offset of each open buffer. `is_held` (n): it must rest on a buffer that is still open.
    `is_open` (n): to be placed. `loads` (s): the sum of the open sizes in each section.
    """

    starts: Numbers
    is_held: Flags
    is_open: Flags
    loads: Numbers


class BranchAndBound:
    """One depth-first run below `height` units; `offsets` (n, in units) holds the placement after FOUND.

    `ranks` (n) says which of several buffers at the same height is tried first. `weights` (s) is raised where sections fail and may be handed
    to the next run. Without `uses_sections` there are conflict sets only, which suits problems with room to waste. A run stops after `num_nodes` nodes or at `deadline` (of `time.monotonic`).
    """

    def __init__(
        self,
        board: Board,
        height: int,
        *,
        ranks: npt.NDArray[np.intp],
        weights: npt.NDArray[np.float64],
        uses_sections: bool,
        num_nodes: int,
        deadline: float,
    ) -> None:
        self.board = board
        self.height = height
        self.ranks = ranks
        self.weights = weights
        self.uses_sections = uses_sections
        self.num_nodes_left = num_nodes
        self.deadline = deadline
        self.offsets = np.zeros(len(board.sizes), dtype=np.int64)

    def run(self) -> Outcome:
        """Searches from the empty placement."""
        num_buffers = len(self.board.sizes)
        root = PartialPlacement(
            np.zeros(num_buffers, dtype=np.int64),
            np.zeros(num_buffers, dtype=np.bool_),
            np.ones(num_buffers, dtype=np.bool_),
            self.board.member_sizes.sum(axis=1),
        )
        # The search recurses once per placed buffer, deeper than Python's limit of 1000 for large groups.
        with _deep_recursion(_FRAMES_PER_BUFFER * num_buffers):
            return self._solve(root)

    def _solve(self, node: PartialPlacement) -> Outcome:
        """Solves each group of buffers whose lifetimes do not overlap; the first without a solution ends it."""
        if not node.is_open.any():
            return Outcome.FOUND
        parts = self.board.parts(node.is_open)
        if len(parts) == 1:
            return self._solve_part(node)
        for part in parts:
            is_open = np.zeros_like(node.is_open)
            is_open[part] = True
            loads = self.board.member_sizes[:, part].sum(axis=1)
            outcome = self._solve_part(PartialPlacement(node.starts, node.is_held & is_open, is_open, loads))
            if outcome is not Outcome.FOUND:
                return outcome
        return Outcome.FOUND

    def _solve_part(self, node: PartialPlacement) -> Outcome:
        self.num_nodes_left -= 1
        if self.num_nodes_left < 0 or time.monotonic() > self.deadline:
            return Outcome.STOPPED
        tightened = self._tighten(node)
        if tightened is None:
            return Outcome.EXHAUSTED
        choices = np.flatnonzero(self._choices(tightened))
        # Lowest start first, then by the order of the run.
        order = np.lexsort((self.ranks[choices], tightened.starts[choices]))
        for position, buffer in enumerate(choices[order]):
            if position:
                # No solution has the previous buffer at its start, so it must rest on a buffer that is placed later.
                is_held = tightened.is_held.copy()
                is_held[choices[order[position - 1]]] = True
                tightened = self._tighten(dataclasses.replace(tightened, is_held=is_held))
                if tightened is None:
                    return Outcome.EXHAUSTED
            # Inference has shown meanwhile that it cannot be placed at its start.
            if tightened.is_held[buffer]:
                continue
            self.offsets[buffer] = tightened.starts[buffer]
            outcome = self._solve(self._placed(tightened, buffer))
            if outcome is not Outcome.EXHAUSTED:
                return outcome
        return Outcome.EXHAUSTED

    def _placed(self, node: PartialPlacement, buffer: np.intp) -> PartialPlacement:
        """The node after `buffer` was placed at its start; overlapping ones move above it, and held ones may rest on it."""
        board = self.board
        top = node.starts[buffer] + board.sizes[buffer]
        is_lifted = board.meets[buffer] & (node.starts <= top)
        is_open = node.is_open.copy()
        is_open[buffer] = False
        return PartialPlacement(
            np.where(is_lifted, top, node.starts),
            node.is_held & ~is_lifted,
            is_open,
            node.loads - board.member_sizes[:, buffer],
        )

    def _tighten(self, node: PartialPlacement) -> PartialPlacement | None:
        """The node with starts raised as far as can be inferred, or None where some section cannot hold its buffers any more."""
        board, is_open, loads = self.board, node.is_open, node.loads
        starts, is_held = node.starts, node.is_held
        latest = self.height - loads
        while True:
            open_starts = np.where(is_open, starts, FAR)
            tops = open_starts + board.sizes
            if self._fails(starts, is_open):
                return None
            # A buffer that would waste too much of a section is not next in it; where nothing fits below it, it has to wait for another one.
            first_tops = (board.outside + tops).min(axis=1)
            waits = board.members & (starts > latest[:, None]) & (starts < first_tops[:, None])
            is_held = is_held | (is_open & waits.any(axis=0))
            held = np.flatnonzero(is_held)
            if not len(held):
                return PartialPlacement(starts, is_held, is_open, loads)
            supports = (board.apart_or_self[held] + tops).min(axis=1)
            if not (supports > starts[held]).any():
                return PartialPlacement(starts, is_held, is_open, loads)
            starts = starts.copy()
            starts[held] = np.maximum(starts[held], supports)

    def _fails(self, starts: Numbers, is_open: Flags) -> bool:
        """Whether some section is too full: those that start at or above any height must fit between it and the top (Jackson, 1955). Adds weight to those sections."""
        board = self.board
        open_buffers = np.flatnonzero(is_open)
        order = open_buffers[np.argsort(-starts[open_buffers], kind="stable")]
        heights = np.cumsum(board.member_sizes[:, order], axis=1) + starts[order]
        is_full = ((heights > self.height) & board.members[:, order]).any(axis=1)
        if not is_full.any():
            return False
        self.weights[is_full] += 1
        return True

    def _choices(self, node: PartialPlacement) -> Flags:
        """The most promising set of buffers of which one must be placed at its start: a small set, in sections that failed often."""
        board = self.board
        starts = np.where(node.is_open, node.starts, FAR)
        tops = starts + board.sizes
        other_tops = (board.apart_or_self + tops).min(axis=1)
        # A set is valid only if none of its buffers can be lifted by another and still come in time.
        conflicts = board.meets & (starts < tops[:, None])
        is_invalid = (conflicts & (np.minimum(other_tops, tops) < tops[:, None])).any(axis=1) | ~node.is_open
        conflicts &= ~node.is_held
        weights = np.where(board.members, self.weights[:, None], 0).max(axis=0)
        scores = _scores(conflicts.sum(axis=1), weights, is_invalid, tops)
        best = scores.argmin()
        if not self.uses_sections:
            return conflicts[best]

        latest = (self.height - node.loads)[:, None]
        nexts = board.members & (starts <= latest)
        is_invalid = (nexts & (other_tops <= latest)).any(axis=1) | (node.loads == 0)
        nexts &= ~node.is_held
        section_scores = _scores(nexts.sum(axis=1), self.weights, is_invalid, np.zeros_like(node.loads))
        best_section = section_scores.argmin()
        return nexts[best_section] if section_scores[best_section] <= scores[best] else conflicts[best]


def _scores(
    counts: Numbers, weights: npt.NDArray[np.float64], is_invalid: Flags, heights: Numbers
) -> npt.NDArray[np.float64]:
    scores = np.where(counts <= _FORCED, 0.0, counts / weights)
    return np.where(is_invalid, _NOT_A_CHOICE, scores + heights * _LOWEST_FIRST)


@contextmanager
def _deep_recursion(num_frames: int) -> Iterator[None]:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(before + num_frames)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)
