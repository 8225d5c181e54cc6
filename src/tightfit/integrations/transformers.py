"""A callback for the Trainer of transformers: a batch that finds no memory is taken back and run again (`tightfit.guard`).

from tightfit.integrations.transformers import GuardCallback

trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[GuardCallback()])
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from tightfit.guarding.loops.framework_steps import FrameworkGuard
from tightfit.planner.plan import Plan
from tightfit.torch_hooks.manifest import TRAINER_STEP


class GuardCallback(TrainerCallback):
    """Guards the forward and backward pass of each batch of the Trainer that it is given to. `statistics` counts steps, errors and replays.

    `plans` are files of `tightfit plan -o`, or `Plan` objects, from the fastest to the one that holds least: the ladder that it goes down. A batch that
    fails for good leaves a file in the folder `post_mortems`, and ends with its own error, whose notes say why.
    """

    def __init__(self, *, plans: Sequence[Plan | str | Path] = (), post_mortems: str | Path = ".") -> None:
        self.statistics: Counter[str] = Counter()
        self._plans = [each if isinstance(each, Plan) else Plan.load(each) for each in plans]
        self._folder = Path(post_mortems)
        self._guard: FrameworkGuard | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The model and the optimizer are there."""
        # One that an error has ended told nobody.
        self._end()
        optimizers = [kwargs.get("optimizer")]
        self._guard = FrameworkGuard(
            TRAINER_STEP, self, kwargs["model"], optimizers, plans=self._plans, folder=self._folder
        )
        self.statistics = self._guard.statistics

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Everything is taken off."""
        self._end("its Trainer has a `training_step` of its own that does not call transformers'")

    def _end(self, why_unguarded: str = "") -> None:
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.end(why_unguarded)
