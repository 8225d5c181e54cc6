"""One loop of `generate`: compares its turns, leaves out those between, and compares the turns behind with what was foretold for them."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from tightfit.capture.dispatch.virtual import VirtualGpu
from tightfit.capture.steps.token_loops.carried_state import NotCarried, Snapshot, carry_on, snapshot
from tightfit.capture.steps.token_loops.own_code import runs_own_code
from tightfit.capture.steps.token_loops.turns import (
    Place,
    Turn,
    are_alike,
    is_as_foretold,
    moving,
    place_on,
    turn_between,
)
from tightfit.tape.left_out import LeftOut

LIBRARY = "transformers"
PERIODS = (1, 8, 16)
"""Lengths are rounded up to so many by kernels and masks: turns are alike after so many."""
_MIN_ALIKE = 3
MIN_TURNS = 16
"""Fewer are traced."""
_MAX_LOOKS = 96
# Traced behind what was left out, in periods: they are compared with what was foretold.
_PERIODS_BEHIND = 2
_PERIODS_COMPARED = 5
# Of the model or of the user, and asked in each turn.
_ASKED = frozenset({"logits_processor", "stopping_criteria", "streamer"})
_AT_LENGTHS = ("window", "chunk", "position", "max_length", "max_len")


@dataclasses.dataclass(slots=True, kw_only=True)
class _Foretold:
    """What the turns behind those left out must be like: `number` periods of `period` turns behind `last`."""

    period: int
    before: Turn
    last: Turn
    number: int
    at: int
    is_confirmed: bool = False


class TokenLoop:
    """One call of the loop, in the frame with the address `frame`, at `length` tokens. Turns are left out where the last `num_alike` were alike; `differs` ends the trace,
    which is begun again. `is_left_alone`: its turns are run.
    """

    def __init__(self, gpu: VirtualGpu, num_alike: int, frame: int, differs: Callable[[], NoReturn]) -> None:
        self.frame, self.length = frame, 0
        self.is_left_alone = False
        self._gpu = gpu
        self._num_alike = num_alike
        self._differs = differs
        # Where each turn began, and what it carried then (None: not to be left out).
        self._places: list[Place] = []
        self._snapshots: list[Snapshot | None] = []
        self._foretold: _Foretold | None = None

    @property
    def must_be_confirmed(self) -> bool:
        """Whether turns were left out that no later turn has confirmed."""
        return self._foretold is not None and not self._foretold.is_confirmed

    def look(self, model: Any, values: dict[str, Any]) -> dict[str, int | float]:
        """A turn begins, in a frame with these locals: it is compared with those before, and turns may be left out. Returns the numbers that locals are to become then."""
        foretold, numbers = self._foretold, dict[str, int | float]()
        if not self._places and runs_own_code(model):
            self.is_left_alone = True
            return numbers
        self._places.append(place_on(self._gpu.recorder, self._gpu.storages.indices()))
        self._snapshots.append(self._snapshot(values))
        if foretold is not None:
            self._confirm(foretold)
        if foretold is None or foretold.is_confirmed:
            numbers = self._leave_out(model, values)
            if len(self._places) > _MAX_LOOKS + (0 if foretold is None else foretold.at):
                self.is_left_alone = True
        return numbers

    def _snapshot(self, values: dict[str, Any]) -> Snapshot | None:
        try:
            return snapshot(self._gpu, values, LIBRARY, _ASKED)
        except NotCarried:
            return None

    def _leave_out(self, model: Any, values: dict[str, Any]) -> dict[str, int | float]:
        for period in PERIODS:
            if len(self._places) % period:
                continue
            chosen = self._places[-1::-period][: _PERIODS_COMPARED + 1]
            snapshots = self._snapshots[-1::-period][:3]
            # The first turn reads the whole prompt.
            if (
                len(chosen) <= _PERIODS_COMPARED
                or len(self._places) < _PERIODS_COMPARED * period + 2
                or None in snapshots
            ):
                continue
            if self._foretold is not None and len(self._places) - 1 - _PERIODS_COMPARED * period < self._foretold.at:
                continue
            number = _num_turns_ahead(model, values, self.length, period) // period
            if number * period < MIN_TURNS:
                continue
            handed_on = moving(chosen[3::-1])
            # First what is told at once: a loop that is never alike is looked at in each turn.
            turns = None if handed_on is None else self._turns(chosen[::-1])
            if turns is None or handed_on is None or not are_alike(turns) or not self._were_alike(period):
                continue
            now, second, first = snapshots
            assert now is not None and second is not None and first is not None
            try:
                numbers = carry_on(self._gpu, values, LIBRARY, (first, second, now), number)
            except NotCarried:
                continue
            self._note(chosen[1], chosen[0], number, number * period, handed_on)
            self.length += number * period
            self._foretold = _Foretold(
                period=period, before=turns[1], last=turns[2], number=number, at=len(self._places) - 1
            )
            return numbers
        return {}

    def _turns(self, places: list[Place]) -> tuple[Turn, Turn, Turn] | None:
        # What the oldest of three turns frees is of the two before.
        found = [turn_between(self._gpu.recorder, places[0], a, b) for a, b in itertools.pairwise(places[-4:])]
        first, second, third = found
        return None if first is None or second is None or third is None else (first, second, third)

    def _were_alike(self, period: int) -> bool:
        """Whether as many turns were alike as is asked for, beyond the last three."""
        places = self._places[-1::-period][: self._num_alike + 3][::-1]
        if period > 1 or self._num_alike <= _MIN_ALIKE:
            return True
        if len(places) < self._num_alike + 3:
            return False
        found = [self._turns(places[at : at + _PERIODS_COMPARED + 1]) for at in range(len(places) - _PERIODS_COMPARED)]
        return all(turns is not None and are_alike(turns) for turns in found)

    def _note(self, begin: Place, end: Place, number: int, num_turns: int, handed_on: tuple[int, ...]) -> None:
        recorder = self._gpu.recorder
        recorder.left_out.append(
            LeftOut(
                number=number,
                operators=(begin.operators, end.operators),
                storages=(begin.storages, end.storages),
                events=(begin.events, end.events),
                copies=(begin.copies, end.copies),
                waits=(begin.waits, end.waits),
                geometry=(begin.geometry, end.geometry),
                moving=handed_on,
            )
        )
        recorder.assume(
            self._gpu.attribution.where(),
            f"{num_turns:,} of the tokens made here are as those before and after them, which were traced",
        )

    def _confirm(self, foretold: _Foretold) -> None:
        """A turn behind those left out is over."""
        num_behind, period = len(self._places) - 1 - foretold.at, foretold.period
        if not num_behind or num_behind % period:
            return
        places = self._places[-1::-period][:2]
        first = self._places[foretold.at - _PERIODS_COMPARED * period]
        turn = turn_between(self._gpu.recorder, first, places[1], places[0])
        number = foretold.number + num_behind // period
        if turn is not None and is_as_foretold(turn, foretold.before, foretold.last, number):
            foretold.is_confirmed = True
        elif not foretold.is_confirmed:
            self._differs()


def _num_turns_ahead(model: Any, values: dict[str, Any], length: int, period: int) -> int:
    """How many turns come for certain behind `length` tokens before the last few, or before the length at which the model changes; none if it has just changed."""
    lengths = set(_lengths(model.config))
    if any(length - _PERIODS_COMPARED * period <= limit <= length for limit in lengths):
        return 0
    ends = [
        criterion.max_length
        for criterion in values.get("stopping_criteria", ())
        if type(criterion).__module__.partition(".")[0] == LIBRARY and hasattr(criterion, "max_length")
    ]
    ends += [limit for limit in lengths if limit > length]
    return min(ends, default=0) - length - _PERIODS_BEHIND * period


def _lengths(config: Any) -> Iterator[int]:
    """The lengths that a configuration names: windows, chunks, positions."""
    for name, value in vars(config).items():
        if type(value) is int and any(part in name for part in _AT_LENGTHS):
            yield value
        elif hasattr(value, "to_dict"):
            yield from _lengths(value)
