"""A callback for Lightning's Trainer: a batch that finds no memory is taken back and run again (`tightfit.guard`).

from tightfit.integrations.lightning import GuardCallback

trainer = lightning.Trainer(callbacks=[GuardCallback()])
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from tightfit.guarding.loops.framework_steps import FrameworkGuard, GuardSettings
from tightfit.guarding.rungs import CALM_STEPS
from tightfit.planner.plan import Plan
from tightfit.torch_hooks.manifest import LIGHTNING_CLOSURE


class GuardCallback(Callback):
    """Guards the `training_step` and backward pass of each batch, with automatic optimization. `statistics` counts steps, errors and replays.

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

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """The module and its optimizers are there."""
        self._end()
        self._guard = FrameworkGuard(LIGHTNING_CLOSURE, self, pl_module, trainer.optimizers, settings=self._settings)
        self.statistics = self._guard.statistics

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """A batch is over, and its update, if it has one."""
        if self._guard is not None:
            self._guard.told_to_end.at_border()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Everything is taken off."""
        self._end("Lightning calls no closure for its batches, as with manual optimization")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Likewise."""
        self._end()

    def _end(self, why_unguarded: str = "") -> None:
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.end(why_unguarded)
