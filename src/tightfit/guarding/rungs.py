"""The ladder of a guarded run: plans made in advance, each of which holds less than the one before, taken in turn when memory runs out."""

from collections.abc import Callable, Sequence

import torch

from tightfit.errors import TightfitError
from tightfit.planner.plan import Plan
from tightfit.runtime.apply import apply
from tightfit.techniques.session import Session

# After so many steps without an error the plan before is tried again, later each time that this fails.
_CALM_STEPS = 100
_MOST_CALM_STEPS = 6400


class Rungs:
    """`plans` for the model that `model` gives when one is to be applied, from the fastest to the one that holds least.

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
    ) -> None:
        self._plans = plans
        self._model = model
        self._optimizers = optimizers
        self._session: Session | None = None
        self._first = first
        self._top = self._at = 0 if has_first else -1
        self._calm_steps = _CALM_STEPS
        self._num_good = 0
        self._has_climbed = False

    @property
    def at(self) -> int:
        """The position of the present plan; -1 without one."""
        return self._at

    def go_down(self) -> bool:
        """Applies the next plan in place of the present one; False if there is none.

        Raises:
            ApplyError: the plan cannot be applied to this model. No plan is applied then.
        """
        if self._at + 1 >= len(self._plans):
            return False
        if self._has_climbed:
            self._calm_steps = min(2 * self._calm_steps, _MOST_CALM_STEPS)
        self._put(self._at + 1)
        return True

    def try_next(self, tried: list[str]) -> bool:
        """The same, with a line about it in `tried`; False too if the plan cannot be applied."""
        try:
            if not self.go_down():
                return False
        except TightfitError as error:
            tried.append(f"plan {self._at + 2}: {error}")
            return False
        tried.append(f"plan {self._at + 1}")
        return True

    def step_succeeded(self) -> bool:
        """Counts a good step; after enough of them the plan before is taken again. True if that was done."""
        self._num_good += 1
        if self._at <= self._top or self._num_good < self._calm_steps:
            return False
        self._put(self._at - 1)
        self._has_climbed = True
        return True

    def end(self) -> None:
        """Takes the present plan off."""
        if self._session is not None:
            self._session.undo()
            self._session = None
        elif self._at == self._top == 0 and (first := self._first()) is not None:
            first.undo()
        self._at = -1

    def _put(self, at: int) -> None:
        self.end()
        self._num_good, self._has_climbed = 0, False
        if at >= 0:
            self._session = apply(self._plans[at], self._model(), self._optimizers())
            self._at = at
