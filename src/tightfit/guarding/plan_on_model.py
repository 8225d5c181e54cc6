"""The plan of a ladder that is on the model of a guarded run: applied, and taken off for another one, when memory is short."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from tightfit.errors import ApplyError, TightfitError, forget_apply_errors
from tightfit.guarding.memory.out_of_memory import is_out_of_memory, release_memory, without_frames
from tightfit.guarding.memory.retried_operators import RetriedOperators
from tightfit.planner.plan import Plan
from tightfit.techniques.session import Session


class Put(Protocol):
    """What applies a plan: `tightfit.apply`, with settings of its own."""

    def __call__(
        self, plan: Plan, model: torch.nn.Module, optimizer: Sequence[torch.optim.Optimizer], /
    ) -> Session: ...


class PlanOnModel:
    """One of `plans`, or none, on the model that `model` gives when one is to be applied. `put` applies one.

    `first`: the session of the first plan, where that is applied already.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        model: Callable[[], torch.nn.Module],
        optimizers: Callable[[], Sequence[torch.optim.Optimizer]],
        *,
        first: Callable[[], Session | None],
        has_first: bool,
        put: Put,
    ) -> None:
        self._plans = plans
        self._model = model
        self._optimizers = optimizers
        self._put_on = put
        self.session: Session | None = None
        self._first = first
        self._has_first = has_first
        self.at = 0 if has_first else -1
        """The position of the plan; -1 without one."""
        self.useless: set[int] = set()
        """Plans that cannot be used here, by their positions."""
        self._broken = ""

    def begin(self) -> bool:
        """A step begins: a plan that was put on before the program made another optimizer is put on again; whether that was done.

        Raises:
            ApplyError: a plan could not be taken off, and has left the model in parts.
        """
        if self._broken:
            raise ApplyError(self._broken)
        if self.session is None:
            return False
        known = list(map(id, self.session.optimizers))
        if all(id(optimizer) in known for optimizer in self._optimizers()):
            return False
        at = self.at
        # One that the program has dropped goes with the session that knew it.
        self.put(-1)
        release_memory()
        self.put(at)
        return True

    def refuses(self, error: BaseException) -> bool:
        """Whether an error is the refusal of the plan that was applied here: it cannot be used for this step."""
        return isinstance(error, ApplyError) and self.session is not None and self.session.verdict.failure is not None

    def put(self, at: int) -> str:
        """Applies the plan of this position, -1 for none, in place of this one. If it cannot be applied, returns why; no plan is on the model then."""
        # An operator that finds no memory while states and weights move is run again: the model must not be left in parts.
        with RetriedOperators(release_memory):
            self._take_off()
            if at < 0:
                return ""
            try:
                self.session = self._put_on(self._plans[at], self._model(), self._optimizers())
            except TightfitError as error:
                self.useless.add(at)
                forget_apply_errors(str(error))
                return str(error)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                without_frames(error)
                self._raise_notes(error, at)
                return "no memory to apply it"
        self.at = at
        return ""

    def undo(self) -> None:
        """Takes the plan off."""
        if self.session is not None:
            session, self.session = self.session, None
            session.undo()
        elif self.at == 0 and self._has_first and (first := self._first()) is not None:
            first.undo()
        self.at = -1

    def _take_off(self) -> None:
        at = self.at
        try:
            self.undo()
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
