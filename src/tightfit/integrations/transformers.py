"""A callback for the Trainer of transformers: a batch that finds no memory is taken back and run again (`tightfit.guard`).

from tightfit.integrations.transformers import GuardCallback

trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[GuardCallback()])
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from tightfit.guarding.loops.framework_steps import FrameworkGuard, GuardSettings
from tightfit.guarding.rungs import CALM_STEPS
from tightfit.planner.plan import Plan
from tightfit.torch_hooks.manifest import TRAINER_STEP


class GuardCallback(TrainerCallback):
    """Guards the forward and backward pass of each batch of the Trainer that it is given to. `statistics` counts steps, errors and replays.

    `plans` are files of `tightfit plan -o`, or `Plan` objects, from the fastest to the one that holds least: the ladder that it goes down. A batch that
    fails for good leaves a file in the folder `post_mortems`, and ends with its own error, whose notes say why. `on_terminate`, `calm_steps` and `ballast`
    are those of `tightfit.guard`.
    """

    def __init__(
        self,
        *,
        plans: Sequence[Plan | str | Path] = (),
        on_terminate: Callable[[], object] | None = None,
        post_mortems: str | Path = ".",
        calm_steps: int = CALM_STEPS,
        ballast: str | int = 0,
    ) -> None:
        self.statistics: Counter[str] = Counter()
        settings = GuardSettings(
            plans=plans, on_terminate=on_terminate, post_mortems=post_mortems, calm_steps=calm_steps, ballast=ballast
        )
        # A file that is no plan is an error here, and not when training begins.
        self._settings = dataclasses.replace(settings, plans=settings.ladder())
        self._guard: FrameworkGuard | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The model and the optimizer are there."""
        # One that an error has ended told nobody.
        self._end()
        optimizers = [kwargs.get("optimizer")]
        self._guard = FrameworkGuard(TRAINER_STEP, self, kwargs["model"], optimizers, settings=self._settings)
        self.statistics = self._guard.statistics

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The weights are updated."""
        if self._guard is not None:
            self._guard.told_to_end.at_border()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Everything is taken off."""
        self._end("its Trainer has a `training_step` of its own that does not call transformers'")

    def _end(self, why_unguarded: str = "") -> None:
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.end(why_unguarded)
