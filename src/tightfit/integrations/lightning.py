"""A callback for Lightning's Trainer: a batch that finds no memory is taken back and run again (`tightfit.guard`).

from tightfit.integrations.lightning import GuardCallback

trainer = lightning.Trainer(callbacks=[GuardCallback()])
"""

from typing import Any

from lightning.pytorch import Callback

from tightfit.guarding.loops.framework_callback import FrameworkCallback
from tightfit.torch_hooks.manifest import LIGHTNING_CLOSURE


class GuardCallback(FrameworkCallback, Callback):
    """Guards the `training_step` and backward pass of each batch, with automatic optimization. `statistics` counts steps, errors and replays.

    `plans` are files of `tightfit plan -o`, or `Plan` objects, from the fastest to the one that holds least: the ladder that it goes down. A batch that
    fails for good leaves a file in the folder `post_mortems`, and ends with its own error, whose notes say why. `on_terminate`, `calm_steps` and `ballast`
    are those of `tightfit.guard`.
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """The module and its optimizers are there."""
        self._begin(LIGHTNING_CLOSURE, pl_module, trainer.optimizers)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """A batch is over, and its update, if it has one."""
        self._at_border()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Everything is taken off."""
        self._end("Lightning calls no closure for its batches, as with manual optimization")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Likewise."""
        self._end()
