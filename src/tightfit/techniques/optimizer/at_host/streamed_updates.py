"""Seconds and memory of updates whose states come from the host and go back, from the moves of an `UpdateWindow` on three clocks.

The computation's stream and the link's two directions; a copy begins after what the computation has been given by then, and an update after its states
are there.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from tightfit.planner.sides import Sides
from tightfit.techniques.optimizer.states.update_window import StateMove, UpdateWindow


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StreamedUpdate:
    """The update of one parameter: `state_bytes` of states at the host in `num_copies` copies, `seconds` of its kernels after `seconds_before` of
    other computation, `result_bytes` of temporaries meanwhile.
    """

    state_bytes: int
    num_copies: int
    seconds: float
    seconds_before: float = 0.0
    result_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Streamed:
    """`sides` until all updates are done and all states are back at the host. `levels` are bytes on the card during each update, with its temporaries,
    and from then to the next.
    """

    sides: Sides
    levels: tuple[tuple[int, int], ...]

    @property
    def peak_bytes(self) -> int:
        """The most of states and temporaries at once."""
        return max((max(level) for level in self.levels), default=0)


class _StreamClocks:
    def __init__(self, updates: Sequence[StreamedUpdate], seconds_of: Callable[[int, bool], float]) -> None:
        self._updates = updates
        self._seconds_of = seconds_of
        self.computation = 0.0
        self._to_card = self._to_host = 0.0
        self._arrived: dict[int, float] = {}
        self._left: dict[int, float] = {}

    def move(self, move: StateMove) -> None:
        """Advances the clocks of the link; the computation waits for what has to have left."""
        if move.kind == "come":
            begin = max(self._to_card, self.computation)
            self._to_card = self._arrived[move.index] = begin + self._copied(move.index, to_card=True)
        elif move.kind == "leave":
            begin = max(self._to_host, self.computation)
            self._to_host = self._left[move.index] = begin + self._copied(move.index, to_card=False)
        else:
            self.computation = max(self.computation, self._left[move.index])

    def update(self, index: int) -> None:
        """The computation waits for the states, and updates."""
        arrived = self._arrived.get(index, 0.0)
        self.computation = (
            max(self.computation + self._updates[index].seconds_before, arrived) + self._updates[index].seconds
        )

    def _copied(self, index: int, *, to_card: bool) -> float:
        update = self._updates[index]
        if not update.num_copies:
            return 0.0
        return update.num_copies * self._seconds_of(update.state_bytes // update.num_copies, to_card)


def streamed(
    updates: Sequence[StreamedUpdate],
    window_bytes: int,
    seconds_of: Callable[[int, bool], float],
    *,
    seconds_after: float = 0.0,
    issue_seconds: float = 0.0,
) -> Streamed:
    """The updates in order, within a window of `window_bytes`; `seconds_of(num_bytes, to_card)` are those of a copy, `seconds_after` of computation follow, and
    the host takes `issue_seconds` for all of it."""
    # What has no states at the host does not count among those that are ahead.
    at_host = [index for index, update in enumerate(updates) if update.state_bytes]
    place = {index: number for number, index in enumerate(at_host)}
    window = UpdateWindow([updates[index].state_bytes for index in at_host], window_bytes)
    clocks = _StreamClocks(updates, seconds_of)
    levels = []

    def moved(moves: Iterable[StateMove]) -> int:
        most = window.bytes_on_card
        for move in moves:
            clocks.move(StateMove(kind=move.kind, index=at_host[move.index]))
            most = max(most, window.bytes_on_card)
        return most

    moved(window.begin())
    for index, update in enumerate(updates):
        if index in place:
            moved(window.before(place[index]))
        while_updated = window.bytes_on_card + update.result_bytes
        clocks.update(index)
        levels.append((while_updated, moved(window.after(place[index])) if index in place else window.bytes_on_card))
    clocks.computation += seconds_after
    moved(window.end())
    return Streamed(sides=Sides(on_card=clocks.computation, on_host=issue_seconds), levels=tuple(levels))
