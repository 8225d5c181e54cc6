"""The loop of `generate` in transformers, which makes a token in each turn: turns between that are alike are left out.

At the beginning of each turn the tape and the loop's state are compared with those of the turns before. Where the last three did the same, with sizes that grow by the
same, the state is carried on to a few turns before the end, or before the length at which the model changes (a window); the tape notes what was
left out (`tightfit.tape.left_out`). The turns behind are compared with what was foretold for them: where they differ, the trace is begun again with more turns before,
and then with all.
"""

import dataclasses
import functools
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from tightfit.capture.dispatch.virtual import VirtualGpu
from tightfit.capture.steps.token_loops.carried_state import NotCarried, Snapshot, carry_on, snapshot
from tightfit.capture.steps.token_loops.turns import (
    Place,
    Turn,
    are_alike,
    is_as_foretold,
    moving,
    place_on,
    turn_between,
)
from tightfit.errors.private_names import known
from tightfit.tape.left_out import LeftOut

_IS_UNFINISHED = known(
    "transformers.generation.utils:GenerationMixin._has_unfinished_sequences",
    "to leave out alike turns of `generate`",
    "capture/steps",
    first="4.51",
    last="5.23",
)
_LOOP = known(
    "transformers.generation.utils:GenerationMixin._sample",
    "whose turns they are",
    "capture/steps",
    first="4.51",
    last="5.23",
)
_LIBRARY = _IS_UNFINISHED.library
PERIODS = (1, 8, 16)
"""Lengths are rounded up to so many by kernels and masks: turns are alike after so many."""
_MIN_ALIKE = 3
MIN_TURNS = 16
"""Fewer are traced."""
_MAX_LOOKS = 80
# Traced behind what was left out, in periods: they are compared with what was foretold.
_PERIODS_BEHIND = 2
_PERIODS_COMPARED = 4
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


@dataclasses.dataclass(slots=True)
class _Loop:
    """One call of the loop: where each turn began, what it carried then (None: not to be left out), and what was foretold."""

    frame: int
    length: int = 0
    places: list[Place] = dataclasses.field(default_factory=list)
    snapshots: list[Snapshot | None] = dataclasses.field(default_factory=list)
    foretold: _Foretold | None = None
    is_left_alone: bool = False


class GenerateLoops:
    """The loops of `generate` on `gpu`, of programs that only predict: for others `trains` says that calls are answered one by one (`tightfit.capture.steps.growing_calls`).

    Turns are left out where the last `num_alike` were alike; `differs` ends the trace, which is begun again with more of them."""

    def __init__(
        self, gpu: VirtualGpu, num_alike: int, trains: Callable[[], bool], differs: Callable[[], NoReturn]
    ) -> None:
        self._gpu = gpu
        self._trains = trains
        self._num_alike = num_alike
        self._differs = differs
        self._loops: list[_Loop] = []

    def install(self, at_import: Callable[[str, Callable[[types.ModuleType], None]], None]) -> None:
        """Is asked in each turn from now on. `at_import` calls a function with a module when that is imported."""
        at_import(_IS_UNFINISHED.module, self._watch)

    @property
    def must_be_confirmed(self) -> bool:
        """Whether turns were left out that no later turn has confirmed."""
        return any(loop.foretold is not None and not loop.foretold.is_confirmed for loop in self._loops)

    def _watch(self, module: types.ModuleType) -> None:
        holder = getattr(module, "GenerationMixin", None)
        is_unfinished = getattr(holder, _IS_UNFINISHED.name, None)
        # A release without it runs every turn.
        if holder is None or is_unfinished is None:
            return

        @functools.wraps(is_unfinished)
        def asked(model: Any, is_finished: Any, *args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            if frame.f_code.co_name == _LOOP.name and not self._trains():
                self._turn(model, frame)
            del frame
            return is_unfinished(model, is_finished, *args, **kwargs)

        setattr(holder, _IS_UNFINISHED.name, asked)

    def _turn(self, model: Any, frame: types.FrameType) -> None:
        """A turn begins in `frame`, or the loop ends."""
        values = _locals_of(frame)
        try:
            values.pop("self", None)
            loop = self._loop(frame, values["input_ids"].shape[1])
            if not loop.is_left_alone and not self._gpu.has_side_streams:
                self._look(model, loop, values)
        finally:
            # Before Python 3.13 a frame keeps the dictionary, and with it what the loop drops.
            values.clear()

    def _loop(self, frame: types.FrameType, length: int) -> _Loop:
        # Another loop may have a frame at the same address.
        if not self._loops or self._loops[-1].frame != id(frame) or self._loops[-1].length + 1 != length:
            self._loops.append(_Loop(id(frame)))
        self._loops[-1].length = length
        return self._loops[-1]

    def _look(self, model: Any, loop: _Loop, values: dict[str, Any]) -> None:
        foretold = loop.foretold
        loop.places.append(place_on(self._gpu.recorder, self._gpu.storages.indices()))
        loop.snapshots.append(self._snapshot(values))
        if foretold is not None:
            self._confirm(loop, foretold)
        if foretold is None or foretold.is_confirmed:
            self._leave_out(model, loop, values)
            if len(loop.places) > _MAX_LOOKS + (0 if foretold is None else foretold.at):
                loop.is_left_alone = True

    def _snapshot(self, values: dict[str, Any]) -> Snapshot | None:
        try:
            return snapshot(self._gpu, values, _LIBRARY, _ASKED)
        except NotCarried:
            return None

    def _leave_out(self, model: Any, loop: _Loop, values: dict[str, Any]) -> None:
        for period in PERIODS:
            chosen = loop.places[-1::-period][: _PERIODS_COMPARED + 1]
            snapshots = loop.snapshots[-1::-period][:3]
            # The first turn reads the whole prompt.
            if (
                len(chosen) <= _PERIODS_COMPARED
                or len(loop.places) < _PERIODS_COMPARED * period + 2
                or None in snapshots
            ):
                continue
            if loop.foretold is not None and len(loop.places) - 1 - _PERIODS_COMPARED * period < loop.foretold.at:
                continue
            number = _num_turns_ahead(model, values, period) // period
            if number * period < MIN_TURNS:
                continue
            turns = self._turns(chosen[::-1])
            handed_on = moving(chosen[3::-1])
            if turns is None or handed_on is None or not are_alike(turns) or not self._were_alike(loop, period):
                continue
            now, second, first = snapshots
            assert now is not None and second is not None and first is not None
            try:
                carry_on(self._gpu, values, _LIBRARY, (first, second, now), number)
            except NotCarried:
                continue
            self._note(chosen[1], chosen[0], number, number * period, handed_on)
            loop.length += number * period
            loop.foretold = _Foretold(
                period=period, before=turns[1], last=turns[2], number=number, at=len(loop.places) - 1
            )
            return

    def _turns(self, places: list[Place]) -> tuple[Turn, Turn, Turn] | None:
        # What the oldest of three turns frees is of the one before.
        oldest, *own = places
        found = [turn_between(self._gpu.recorder, oldest, a, b) for a, b in itertools.pairwise(own)]
        first, second, third = found
        return None if first is None or second is None or third is None else (first, second, third)

    def _were_alike(self, loop: _Loop, period: int) -> bool:
        """Whether as many turns were alike as is asked for, beyond the last three."""
        places = loop.places[-1::-period][: self._num_alike + 2][::-1]
        if period > 1 or self._num_alike <= _MIN_ALIKE:
            return True
        if len(places) < self._num_alike + 2:
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

    def _confirm(self, loop: _Loop, foretold: _Foretold) -> None:
        """A turn behind those left out is over."""
        num_behind, period = len(loop.places) - 1 - foretold.at, foretold.period
        if not num_behind or num_behind % period:
            return
        places = loop.places[-1::-period][:2]
        first = loop.places[foretold.at - _PERIODS_COMPARED * period]
        turn = turn_between(self._gpu.recorder, first, places[1], places[0])
        number = foretold.number + num_behind // period
        if turn is not None and is_as_foretold(turn, foretold.before, foretold.last, number):
            foretold.is_confirmed = True
        elif not foretold.is_confirmed:
            self._differs()


def _locals_of(frame: types.FrameType) -> dict[str, Any]:
    values = frame.f_locals
    # From Python 3.13 on it is a view of the frame, which keeps nothing.
    return values if isinstance(values, dict) else dict(values)


def _num_turns_ahead(model: Any, values: dict[str, Any], period: int) -> int:
    """How many turns come for certain before the last few, or before the length at which the model changes; none if it has just changed."""
    length = values["input_ids"].shape[1]
    lengths = set(_lengths(model.config))
    if any(length - _PERIODS_COMPARED * period <= limit <= length for limit in lengths):
        return 0
    ends = [
        criterion.max_length
        for criterion in values.get("stopping_criteria", ())
        if type(criterion).__module__.partition(".")[0] == _LIBRARY and hasattr(criterion, "max_length")
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
