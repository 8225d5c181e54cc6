"""Brings the states of the next parameters to the card while the present one is updated, in the expected order of the updates.

What comes is dropped again where the updates end early or come in another order: then each is brought when it is asked for.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, final

import torch

from tightfit.capture.observe.host_python import spends
from tightfit.cost.host_python import HostWork
from tightfit.techniques.optimizer.states.state_codecs import AbstractCodec
from tightfit.techniques.optimizer.states.update_window import StateMove, UpdateWindow


class FetchedState(Protocol):
    """A state that is not on the card."""

    @property
    def num_bytes(self) -> int:
        """Once it is there."""

    def begin(self) -> None:
        """Begins to bring it."""

    def forget(self) -> None:
        """Drops what was brought."""


@final
class StatesAhead:
    """The states of one optimizer, `states_of` each parameter, within a window of `window_bytes` on the card."""

    def __init__(
        self,
        codec: AbstractCodec,
        states_of: Callable[[torch.Tensor], Sequence[FetchedState]],
        window_bytes: int,
    ) -> None:
        self._codec = codec
        self._states_of = states_of
        self._window_bytes = window_bytes
        self._come: dict[int, Sequence[FetchedState]] = {}
        self._numbers_left: dict[int, int] = {}
        self._expect(())

    def _expect(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._places = {parameter: place for place, parameter in enumerate(parameters)}
        self._next = 0
        sizes = [sum(state.num_bytes for state in self._states_of(parameter)) for parameter in parameters]
        self._window = UpdateWindow(sizes, self._window_bytes)

    def expect(self, parameters: Iterable[torch.Tensor]) -> None:
        """The order of the updates from now on; of parameters without such states nothing is brought."""
        self.forget()
        self._expect([parameter for parameter in parameters if self._states_of(parameter)])
        self._make(self._window.begin())

    def before(self, parameter: torch.Tensor) -> bool:
        """Called before the update of a parameter; returns whether it was expected, and then `after` is to be called."""
        place = self._places.get(parameter)
        if place is not None and place == self._next:
            spends(HostWork.OFFLOADED_PARAMETER)
            self._make(self._window.before(place))
            # Not kept: what was at the host is given back when it is taken, and what leaves takes its place there.
            del self._come[place]
            return True
        if place is not None:
            self.forget()
        return False

    def after(self, parameter: torch.Tensor) -> None:
        """Called once its states are on their way back."""
        place = self._places[parameter]
        self._next = place + 1
        self._make(self._window.after(place))

    def forget(self) -> None:
        """Expects nothing any more; what has been brought is dropped."""
        coming = list(self._come.values())
        self._come.clear()
        self._numbers_left.clear()
        self._expect(())
        for states in coming:
            for state in states:
                state.forget()

    def _make(self, moves: Iterable[StateMove]) -> None:
        for move in moves:
            if move.kind == "come":
                self._come[move.index] = states = self._states_of(self._parameters[move.index])
                for state in states:
                    state.begin()
            elif move.kind == "leave":
                self._numbers_left[move.index] = self._codec.num_begun
            else:
                self._codec.settle(self._numbers_left.pop(move.index))
