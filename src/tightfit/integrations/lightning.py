"""A callback for Lightning's Trainer: a batch that finds no memory is taken back and run again (`tightfit.guard`).

from tightfit.integrations.lightning import GuardCallback

trainer = lightning.Trainer(callbacks=[GuardCallback()])
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from tightfit.guarding.loops.framework_steps import FrameworkGuard
from tightfit.planner.plan import Plan
from tightfit.torch_hooks.manifest import LIGHTNING_CLOSURE


class GuardCallback(Callback):
    """Guards the `training_step` and backward pass of each batch, with automatic optimization. `statistics` counts steps, errors and replays.

    `plans` are files of `tightfit plan -o`, or `Plan` objects, from the fastest to the one that holds least: the ladder that it goes down. A batch that
    fails for good leaves a file in the folder `post_mortems`, and ends with its own error, whose notes say why.
    """

    def __init__(self, *, plans: Sequence[Plan | str | Path] = (), post_mortems: str | Path = ".") -> None:
        self.statistics: Counter[str] = Counter()
        self._plans = [each if isinstance(each, Plan) else Plan.load(each) for each in plans]
        self._folder = Path(post_mortems)
        self._guard: FrameworkGuard | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """The module and its optimizers are there."""
        self._end()
        self._guard = FrameworkGuard(
            LIGHTNING_CLOSURE, self, pl_module, trainer.optimizers, plans=self._plans, folder=self._folder
        )
        self.statistics = self._guard.statistics

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
