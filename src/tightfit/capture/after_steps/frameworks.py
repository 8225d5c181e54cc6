"""Asks the training loops of frameworks to end, as their own callbacks would: Trainer evaluates once more and ends, and so does Lightning.
What a callback of theirs would unfreeze in a later epoch is told.

The loops are library code, which is not rewritten. No framework is imported for it.
"""

import sys
from collections.abc import Callable
from typing import Any

from tightfit.capture.replace import replace

_TRAINER = "transformers.trainer_callback"
_LIGHTNING = ("lightning.pytorch.loops.training_epoch_loop", "pytorch_lightning.loops.training_epoch_loop")


def stop(num_steps: int, leaves: Callable[[str], bool]) -> bool:
    """Ends the loops of the frameworks that are loaded once they have taken `num_steps` and `leaves` says so, which is told what would run in a later epoch (empty:
    nothing that is known). Returns whether there is one."""
    found = False
    if _TRAINER in sys.modules:
        _stop_trainer(sys.modules[_TRAINER].CallbackHandler, num_steps, leaves)
        found = True
    for name in _LIGHTNING:
        if name in sys.modules:
            _stop_lightning(sys.modules[name]._TrainingEpochLoop, num_steps, leaves)
            found = True
    return found


def _stop_trainer(handler: Any, num_steps: int, leaves: Callable[[str], bool]) -> None:
    on_step_end = handler.on_step_end

    def ended(callbacks: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control = on_step_end(callbacks, args, state, control, **kwargs)
        if state.global_step >= num_steps and leaves(""):
            control.should_training_stop = control.should_epoch_stop = True
            # What a longer run would do every `eval_steps` or epochs; saving moves nothing to the GPU.
            control.should_evaluate |= str(getattr(args.eval_strategy, "value", args.eval_strategy)) != "no"
        return control

    replace(handler, on_step_end=ended)


def _stop_lightning(loop: Any, num_steps: int, leaves: Callable[[str], bool]) -> None:
    on_advance_end = loop.on_advance_end

    def ended(epoch: Any, *args: Any, **kwargs: Any) -> Any:
        trainer = epoch.trainer
        if epoch.global_step >= num_steps and leaves(_unfrozen_later(trainer)):
            trainer.should_stop = True
            # It would go on until these are met, and validate only every so many epochs.
            trainer.fit_loop.min_epochs = epoch.min_steps = None
            trainer.check_val_every_n_epoch = trainer.check_val_every_n_epoch and 1
        return on_advance_end(epoch, *args, **kwargs)

    replace(loop, on_advance_end=ended)


def _unfrozen_later(trainer: Any) -> str:
    """The callback of Lightning's `BaseFinetuning` that the trainer has, where something is frozen that it may unfreeze."""
    named = [type(each).__name__ for each in trainer.callbacks if hasattr(each, "finetune_function")]
    is_frozen = not all(parameter.requires_grad for parameter in trainer.lightning_module.parameters())
    return f"what {named[0]} unfreezes" if named and is_frozen else ""
