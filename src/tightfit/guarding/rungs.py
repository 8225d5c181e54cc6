"""The ladder of a guarded run: plans made in advance, each of which holds less than the one before, taken in turn when memory runs out."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from tightfit.errors import ApplyError, TightfitError, forget_apply_errors
from tightfit.guarding.out_of_memory import is_out_of_memory, release_memory, without_frames
from tightfit.guarding.retried_operators import RetriedOperators
from tightfit.planner.plan import Plan
from tightfit.runtime.apply import apply
from tightfit.techniques.session import Session

CALM_STEPS = 100
"""After so many steps without an error the plan before is tried again, later each time that this fails."""
_MOST_CALM_STEPS = 6400


class Put(Protocol):
    """What applies a plan: `tightfit.apply`, with settings of its own."""

    def __call__(
        self, plan: Plan, model: torch.nn.Module, optimizer: Sequence[torch.optim.Optimizer], /
    ) -> Session: ...


class Rungs:
    """`plans` for the model that `model` gives when one is to be applied, from the fastest to the one that holds least. `put` applies one.

    `first`: the session of the first plan, where that is applied already; the ladder ends there then, else above all plans.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        model: Callable[[], torch.nn.Module],
        optimizers: Callable[[], Sequence[torch.optim.Optimizer]],
        *,
        first: Callable[[], Session | None] = lambda: None,
        has_first: bool = False,
        put: Put = apply,
        calm_steps: int = CALM_STEPS,
    ) -> None:
        self._plans = plans
        self._model = model
        self._optimizers = optimizers
        self._put_on = put
        self._session: Session | None = None
        self._first = first
        self._top = self._at = 0 if has_first else -1
        self._calm_steps = calm_steps
        self._num_good = 0
        self._has_climbed = False
        # Plans that cannot be used here, by their positions.
        self._useless: set[int] = set()
        self._broken = ""

    @property
    def at(self) -> int:
        """The position of the present plan; -1 without one."""
        return self._at

    def begin(self) -> None:
        """A step begins: a plan that was put on before the program made another optimizer is put on again.

        Raises:
            ApplyError: a plan could not be taken off, and has left the model in parts.
        """
        if self._broken:
            raise ApplyError(self._broken)
        if self._session is None:
            return
        known = list(map(id, self._session.optimizers))
        if any(id(optimizer) not in known for optimizer in self._optimizers()):
            at = self._at
            # One that the program has dropped goes with the session that knew it.
            self._put(-1)
            release_memory()
            self._put(at)

    def refuses(self, error: BaseException) -> bool:
        """Whether an error is the refusal of a plan that this ladder has applied: it cannot be used for this step."""
        return isinstance(error, ApplyError) and self._session is not None and self._session.verdict.failure is not None

    def try_next(self, tried: list[str]) -> bool:
        """Applies the next plan that can be applied in place of the present one, with a line about each in `tried`; False if there is none.

        Raises:
            ApplyError: the present plan could not be taken off, for want of memory.
        """
        begin = self._at
        for position in range(begin + 1, len(self._plans)):
            if position in self._useless:
                continue
            if position == begin + 1 and self._has_climbed:
                self._calm_steps = min(2 * self._calm_steps, _MOST_CALM_STEPS)
            if not (why := self._put(position)):
                tried.append(f"plan {position + 1}")
                return True
            tried.append(f"plan {position + 1}: {why}")
        return False

    def leave_refused(self, error: BaseException, tried: list[str]) -> None:
        """After a refusal of the present plan: takes it off for good, for the next one, or for none where there is no other.

        Raises:
            ApplyError: it could not be taken off, for want of memory.
        """
        tried.append(f"plan {self._at + 1}: {error}")
        self._useless.add(self._at)
        forget_apply_errors(str(error))
        if not self.try_next(tried):
            self._put(-1)
            tried.append("no plan")

    def step_succeeded(self) -> bool:
        """Counts a good step; after enough of them the plan before is taken again. True if that was done.

        Raises:
            ApplyError: the present plan could not be taken off, for want of memory.
        """
        self._num_good += 1
        if self._at <= self._top or self._num_good < self._calm_steps:
            return False
        here = self._at
        for position in range(here - 1, self._top - 1, -1):
            if position not in self._useless and not self._put(position):
                self._has_climbed = True
                return True
        # It cannot be put on any more, or not for now: the run goes on as it was.
        self._put(here)
        self._calm_steps = min(2 * self._calm_steps, _MOST_CALM_STEPS)
        return False

    def to_the_top(self) -> None:
        """Puts the first usable plan on again, or none where the ladder ends above all plans.

        Raises:
            ApplyError: the present plan could not be taken off, for want of memory.
        """
        for position in range(self._top, self._at):
            if position not in self._useless and not self._put(position):
                return

    def end(self) -> None:
        """Takes the present plan off."""
        with RetriedOperators(release_memory):
            self._undo()

    def _undo(self) -> None:
        if self._session is not None:
            session, self._session = self._session, None
            session.undo()
        elif self._at == self._top == 0 and (first := self._first()) is not None:
            first.undo()
        self._at = -1

    def _put(self, at: int) -> str:
        """Applies the plan of this position, -1 for none, in place of the present one. If it cannot be applied, returns why; no plan is on the model then."""
        # An operator that finds no memory while states and weights move is run again: the model must not be left in parts.
        with RetriedOperators(release_memory):
            self._take_off()
            self._num_good, self._has_climbed = 0, False
            if at < 0:
                return ""
            try:
                self._session = self._put_on(self._plans[at], self._model(), self._optimizers())
            except TightfitError as error:
                self._useless.add(at)
                forget_apply_errors(str(error))
                return str(error)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                without_frames(error)
                self._raise_notes(error, at)
                return "no memory to apply it"
        self._at = at
        return ""

    def _take_off(self) -> None:
        at = self._at
        try:
            self._undo()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self._broken = f"there was no memory to take plan {at + 1} off, and the model is in parts: go on from a checkpoint, in a new process"
            raise ApplyError(self._broken) from without_frames(error)

    def _raise_notes(self, error: BaseException, at: int) -> None:
        """Where what was applied of a plan could not be undone (`tightfit.runtime.apply.undo_after` notes it)."""
        if any("while undoing" in note for note in getattr(error, "__notes__", ())):
            self._broken = f"there was no memory to take the half of plan {at + 1} off, and the model is in parts: go on from a checkpoint, in a new process"
            raise ApplyError(self._broken) from error
