"""What takes an attempt at a step back: the state at its beginning, the loaders that have begun in it, and the batches that it was handed."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tightfit.effects.state import Snapshot
from tightfit.guarding.begun_loaders import BegunLoaders
from tightfit.guarding.memory.retried_operators import RetriedOperators
from tightfit.guarding.memory.retried_updates import UpdateRetries
from tightfit.guarding.replayed_batches import ReplayedBatches
from tightfit.guarding.state.drawn_items import DrawnItem
from tightfit.guarding.state.step_state import StepBeginning, StepStates
from tightfit.techniques.session import Session
from tightfit.torch_hooks.backward import on_backward
from tightfit.torch_hooks.replaced import Leave


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt at a step, from its beginning on. `leave` ends the watch for its backward passes, `draws` sees the batches that it is handed."""

    beginning: StepBeginning
    sources: Sequence[ReplayedBatches[Any]]
    leave: Leave
    draws: "StepDraws"


class StepDraws:
    """Looks at the batches that a step is handed."""

    def __init__(self, states: StepStates, beginning: StepBeginning) -> None:
        self._states = states
        self._beginning = beginning

    def now(self) -> list[Snapshot]:
        """The state of what the step reaches."""
        return self._states.now(self._beginning)

    def drew(self, before: list[Snapshot], batch: Any) -> DrawnItem:
        """A batch was made; `before` is the state before that."""
        return self._states.drew(self._beginning, before, batch)

    def hands_out(self, drawn: DrawnItem, *, is_again: bool) -> None:
        """The step gets it, made now or handed out again."""
        if is_again:
            drawn.put()
        self._beginning.drawn.append(drawn)


class Restoration:
    """Restores the state at the beginning of attempts. `free` frees memory for an operator that is run again; without a `model`, those that steps reach are watched."""

    def __init__(
        self,
        model: torch.nn.Module | None,
        optimizers: Sequence[torch.optim.Optimizer],
        session: Session,
        free: Callable[[], object],
    ) -> None:
        self._optimizers = optimizers
        self._states = StepStates(model, optimizers)
        self.updates = UpdateRetries(session, free, self._learn)
        self._running: Attempt | None = None
        self._loaders = BegunLoaders(self._is_drawing)

    @property
    def is_running(self) -> bool:
        """Whether a step is under way."""
        return self._running is not None

    def begin(
        self,
        reached: Mapping[str, Any],
        *,
        attributes: frozenset[str],
        names_data: Callable[[], bool],
        sources: Sequence[ReplayedBatches[Any]],
    ) -> Attempt:
        """A step begins that reaches these values by name, and `attributes` of Python modules among them."""
        self.updates.cover(self._optimizers)
        with RetriedOperators(self.updates.freed):
            beginning = self._states.begin(reached, attributes=attributes, names_data=names_data)
        draws = StepDraws(self._states, beginning)
        for batches in sources:
            batches.begin(draws)
        leave = on_backward(beginning.gradients)
        attempt = Attempt(beginning=beginning, sources=sources, leave=leave, draws=draws)
        self._running = attempt
        self._loaders.clear()
        self.updates.begin()
        return attempt

    def leave(self, attempt: Attempt) -> None:
        """The attempt is over, whatever its end."""
        self._running = None
        self.updates.end()
        attempt.leave()

    def learn(self, attempt: Attempt, *, is_update: bool = False) -> None:
        """Learns what the attempt has changed, before its weights are updated, or at its end."""
        with RetriedOperators(self.updates.freed):
            self._states.learn(attempt.beginning, is_update=is_update)

    def restore(self, attempt: Attempt, refusal: Callable[[], str] = lambda: "") -> str:
        """Restores the state at the beginning; why that cannot be done, or what is not restored for all that, empty if it was. `refusal` is what the caller knows of."""
        if why_not := self._why_not(attempt, refusal):
            return why_not
        beginning = attempt.beginning
        beginning.restore()
        if left := [change for change in beginning.changes(self._states.now(beginning)) if not change.is_in_place]:
            return str(left[0])
        self._loaders.restore()
        for batches in attempt.sources:
            batches.again()
        return ""

    def now(self, attempt: Attempt) -> list[Snapshot]:
        """The state now, of what the attempt reaches."""
        return self._states.now(attempt.beginning)

    def end(self) -> None:
        """Ends the watch for loaders."""
        self._loaders.end()

    def _why_not(self, attempt: Attempt, refusal: Callable[[], str]) -> str:
        """Why the state at the beginning cannot be restored; empty if it can."""
        why_not = "weights had been updated in it already" if self.updates.is_done else ""
        why_not = why_not or self.updates.half_done or _many_processes() or refusal() or self._loaders.obstacle()
        if any(batches.is_broken for batches in attempt.sources):
            why_not = why_not or "the error was raised while a batch was made, and what makes it cannot be asked again"
        return why_not or self._states.obstacle(attempt.beginning)

    def _is_drawing(self) -> bool:
        running = self._running
        return running is None or any(source.is_drawing for source in running.sources)

    def _learn(self) -> None:
        if self._running is not None:
            self.learn(self._running, is_update=True)


def _many_processes() -> str:
    """Why a step of several processes is not run again; empty for one process."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        return "other processes take part in it, and would wait for this one"
    return ""
