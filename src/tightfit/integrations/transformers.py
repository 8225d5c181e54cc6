"""A callback for the Trainer of transformers: a batch that finds no memory is taken back and run again (`tightfit.guard`).

from tightfit.integrations.transformers import GuardCallback

trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[GuardCallback()])
"""

from typing import Any

from transformers import TrainerCallback

from tightfit.guarding.loops.framework_callback import FrameworkCallback
from tightfit.torch_hooks.manifest import TRAINER_STEP


class GuardCallback(FrameworkCallback, TrainerCallback):
    """Guards the forward and backward pass of each batch of the Trainer that it is given to. `statistics` counts steps, errors and replays.

    `plans` are files of `tightfit plan -o`, or `Plan` objects, from the fastest to the one that holds least: the ladder that it goes down. A batch that
    fails for good leaves a file in the folder `post_mortems`, and ends with its own error, whose notes say why. `on_terminate`, `calm_steps` and `ballast`
    are those of `tightfit.guard`.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The model and the optimizer are there."""
        self._begin(TRAINER_STEP, kwargs["model"], [kwargs.get("optimizer")])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The weights are updated."""
        self._at_border()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Everything is taken off."""
        self._end("its Trainer has a `training_step` of its own that does not call transformers'")
