"""The ladder of a guarded run: plans made in advance, each of which holds less than the one before, taken in turn when memory runs out."""

from collections.abc import Callable, Sequence

import torch

from tightfit.errors import forget_apply_errors
from tightfit.guarding.memory.out_of_memory import release_memory
from tightfit.guarding.memory.retried_operators import RetriedOperators
from tightfit.guarding.plan_on_model import PlanOnModel, Put
from tightfit.planner.plan import Plan
from tightfit.runtime.apply import apply
from tightfit.techniques.session import Session

CALM_STEPS = 100
"""After so many steps without an error the plan before is tried again, later each time that this fails."""
_MOST_CALM_STEPS = 6400


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
        self.plans = plans
        self.present = PlanOnModel(plans, model, optimizers, first=first, has_first=has_first, put=put)
        self._top = self.present.at
        self._calm_steps = calm_steps
        self._num_good = 0
        self._has_climbed = False

    @property
    def at(self) -> int:
        """The position of the present plan; -1 without one."""
        return self.present.at

    def begin(self) -> None:
        """A step begins.

        Raises:
            ApplyError: a plan could not be taken off, and has left the model in parts.
        """
        if self.present.begin():
            self._count_anew()

    def refuses(self, error: BaseException) -> bool:
        """Whether an error is the refusal of a plan that this ladder has applied: it cannot be used for this step."""
        return self.present.refuses(error)

    def try_next(self, tried: list[str]) -> bool:
        """Applies the next plan that can be applied in place of the present one, with a line about each in `tried`; False if there is none.

        Raises:
            ApplyError: the present plan could not be taken off, for want of memory.
        """
        begin = self.at
        for position in range(begin + 1, len(self.plans)):
            if position in self.present.useless:
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
        tried.append(f"plan {self.at + 1}: {error}")
        self.present.useless.add(self.at)
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
        if self.at <= self._top or self._num_good < self._calm_steps:
            return False
        here = self.at
        for position in range(here - 1, self._top - 1, -1):
            if position not in self.present.useless and not self._put(position):
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
        for position in range(self._top, self.at):
            if position not in self.present.useless and not self._put(position):
                return

    def end(self) -> None:
        """Takes the present plan off."""
        with RetriedOperators(release_memory):
            self.present.undo()

    def _put(self, at: int) -> str:
        self._count_anew()
        return self.present.put(at)

    def _count_anew(self) -> None:
        self._num_good, self._has_climbed = 0, False
