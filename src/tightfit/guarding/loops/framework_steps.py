"""Guards the steps of loops that belong to a framework: the forward and backward pass for one batch, as its Trainer calls them.

What the framework does around them (clipping, the update, logging, the next batch) is not run again; operators of an update that find no memory are,
one by one, as everywhere. A framework's trainer reaches its data sets and loggers, which are not looked through for each batch, so what the passes of
each framework can write to is named here. No framework is imported.
"""

import dataclasses
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tightfit.errors.ends import end_all
from tightfit.guarding.attempted_step import run_step
from tightfit.guarding.attempts import Attempts
from tightfit.guarding.loops.outside_effects import OutsideEffects
from tightfit.guarding.memory.ballast import Ballast
from tightfit.guarding.rungs import CALM_STEPS, Rungs
from tightfit.guarding.told_to_end import ToldToEnd
from tightfit.planner.plan import Plan
from tightfit.torch_hooks.calls import StepOwner, on_training_step
from tightfit.torch_hooks.manifest import LIGHTNING_CLOSURE, TRAINER_STEP, Name
from tightfit.units import to_bytes

# Attributes of a Trainer that hold data and settings, or what runs between the batches: the passes for a batch write to none of their contents.
_ASIDE = frozenset(
    ["train_dataset", "eval_dataset", "data_collator", "processing_class", "callback_handler", "args", "accelerator"]
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkStep:
    """What the passes for a batch can write to: values by name, and objects whose own attributes they may bind anew. `callbacks` are the trainer's."""

    reached: Mapping[str, Any]
    rebound: Sequence[Any]
    callbacks: Sequence[Any]


def trainer_step(trainer: Any, arguments: tuple[Any, ...]) -> FrameworkStep:
    """The passes of transformers' `Trainer.training_step(model, inputs, ...)`."""
    reached: dict[str, Any] = {"the model": arguments[0], "the batch": arguments[1:]}
    rebound: tuple[Any, ...] = ()
    # transformers' own classes keep nothing from batch to batch; what a loss of somebody else's may write to is looked through.
    if not type(trainer).__module__.startswith("transformers.") or trainer.compute_loss_func is not None:
        reached |= {f"trainer.{name}": value for name, value in vars(trainer).items() if name not in _ASIDE}
        # Objects of transformers', whose attributes are not looked through.
        reached |= {f"trainer.state.{name}": value for name, value in vars(trainer.state).items()}
        rebound = trainer, trainer.state, trainer.control
    return FrameworkStep(reached=reached, rebound=rebound, callbacks=trainer.callback_handler.callbacks)


def lightning_step(closure: Any, _arguments: tuple[Any, ...]) -> FrameworkStep:
    """The passes of a `Closure.closure()` (lightning/pytorch/loops/optimization/automatic.py): its step is a partial of a method of the optimization loop."""
    step = closure._step_fn
    loop = step.func.__self__
    trainer = loop.trainer
    zeroed = loop.optim_progress.optimizer.zero_grad
    return FrameworkStep(
        reached={
            "the module": trainer.lightning_module,
            "the batch": step.args,
            "what is logged": trainer._results,
            # Their hooks, such as `on_after_backward`, are called within the step.
            "the callbacks": [each for each in trainer.callbacks if not _is_ours(each)],
        },
        rebound=[*(each for each in trainer.callbacks if not _is_ours(each)), zeroed.total, zeroed.current],
        callbacks=trainer.callbacks,
    )


STEPS: Mapping[Name, Callable[[Any, tuple[Any, ...]], FrameworkStep]] = {
    TRAINER_STEP: trainer_step,
    LIGHTNING_CLOSURE: lightning_step,
}
"""By the method that a framework calls for each batch."""


def run_framework_step(
    attempts: Attempts, effects: OutsideEffects, step: FrameworkStep, call: Callable[[], Any]
) -> Any:
    """The result of `call`, which makes the passes of `step`, run again where they find no memory."""
    # Bindings alone: what the values hold is `reached`, where it may be written to.
    bound = [(each, dict(vars(each))) for each in step.rebound]

    def noted() -> Any:
        effects.clear()
        try:
            return call()
        finally:
            effects.printed.stop()

    def restore() -> None:
        effects.printed.again()
        for each, attributes in bound:
            vars(each).clear()
            vars(each).update(attributes)

    return run_step(
        attempts,
        noted,
        {**step.reached, **effects.clear()},
        names_data=lambda: False,
        refusal=lambda: f"it {effects.first}" if effects.first else "",
        restore=restore,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GuardSettings:
    """What the callback of a framework is given, as `tightfit.guard` is."""

    plans: Sequence[Plan | str | Path] = ()
    on_terminate: Callable[[], object] | None = None
    post_mortems: str | Path = "."
    calm_steps: int = CALM_STEPS
    ballast: str | int = 0

    def ladder(self) -> list[Plan]:
        """The plans, loaded."""
        return [each if isinstance(each, Plan) else Plan.load(each) for each in self.plans]


class FrameworkGuard(StepOwner):
    """Guards the steps of the trainer that has the callback `of`, from now until `end`. `statistics` counts what was done."""

    def __init__(
        self,
        name: Name,
        of: Any,
        model: torch.nn.Module,
        optimizers: Sequence[Any],
        *,
        settings: GuardSettings,
    ) -> None:
        own = [_innermost(optimizer) for optimizer in optimizers if optimizer is not None]
        plans, calm_steps = settings.ladder(), settings.calm_steps
        rungs = Rungs(plans, lambda: model, lambda: own, calm_steps=calm_steps)
        ballast_bytes = to_bytes(settings.ballast, "ballast")
        self.told_to_end = ToldToEnd(settings.on_terminate)
        if settings.on_terminate is not None:
            self.told_to_end.begin()
        self._attempts = Attempts(
            model,
            own,
            rungs=rungs,
            folder=Path(settings.post_mortems),
            models=lambda: [model],
            ballast=Ballast(
                ballast_bytes, lambda: next((p.device for p in model.parameters()), None), calm_steps=calm_steps
            ),
        )
        self._step_of = STEPS[name]
        self._of = of
        self._effects = OutsideEffects()
        self._effects.begin()
        self._leave = on_training_step(name, self)

    @property
    def statistics(self) -> Counter[str]:
        """Counts of steps, errors and replays."""
        return self._attempts.statistics

    def around_training_step(self, owner: Any, call: Callable[[], Any], arguments: tuple[Any, ...]) -> Any:
        """The result of the passes."""
        step = self._step_of(owner, arguments)
        if self._attempts.is_running or not any(each is self._of for each in step.callbacks):
            return call()
        self._effects.begin()
        try:
            return run_framework_step(self._attempts, self._effects, step, call)
        except BaseException:
            # It ends most trainings, and transformers calls no callback then: nothing may stay in the process.
            self._effects.end()
            raise

    def end(self, why_unguarded: str = "") -> None:
        """Takes everything off the model, its optimizers and the process. Says on stderr that no step was guarded, and why, if that is so and a reason is given."""
        end_all(self._leave, self._effects.end, self._attempts.end, self.told_to_end.end)
        if why_unguarded and not self.statistics["steps"]:
            sys.stderr.write(f"tightfit: guard: no step of this training was guarded: {why_unguarded}\n")


def _innermost(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer that a framework's wrapper calls."""
    inner = getattr(optimizer, "optimizer", None)
    return _innermost(inner) if isinstance(inner, torch.optim.Optimizer) else optimizer


def _is_ours(callback: Any) -> bool:
    return any(base.__module__.startswith("tightfit.") for base in type(callback).__mro__)
