"""`guard`: runs the steps of a training loop so that an out-of-memory error in one of them does not end the run.

    with tightfit.guard(model, optimizer, plans=["fast.json", "small.json"]) as guarded:
        for batch in loader:
            loss = guarded.step(train_step, batch)

A step that finds no memory is taken back to its beginning (weights, buffers, gradients, random states, whatever it has changed), memory is freed, and
it is run again: first as it was, then with the next plan of the ladder. Its result is the plain step's. A step that cannot be taken back ends with
the error it had, and says why.
"""

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader

from tightfit.capture.patches.loading.largest_batches import shapes_of
from tightfit.errors import UsageError
from tightfit.errors.ends import ended_by
from tightfit.guarding.attempted_step import run_step
from tightfit.guarding.attempts import Attempts
from tightfit.guarding.largest_batch_of import largest_batch_of
from tightfit.guarding.memory.ballast import Ballast
from tightfit.guarding.named_values import attributes_named_by
from tightfit.guarding.parts.adaptive_backward import AdaptiveBackward
from tightfit.guarding.rehearsal import Rehearsal, rehearse_step
from tightfit.guarding.replayed_batches import Batch, ReplayedBatches
from tightfit.guarding.rungs import CALM_STEPS, Rungs
from tightfit.guarding.told_to_end import ToldToEnd
from tightfit.planner.plan import Plan
from tightfit.runtime.apply import has_plan
from tightfit.units import to_bytes

Result = TypeVar("Result")


class GuardedSteps:
    """What `guard` gives: `step` runs a step, `batches` wraps a loader whose batches a step asks for itself. `statistics` counts what was done."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        plans: Sequence[Plan],
        *,
        folder: Path,
        calm_steps: int,
        ballast_bytes: int,
        on_terminate: Callable[[], object] | None,
    ) -> None:
        self.told_to_end = ToldToEnd(on_terminate)
        self._attempts = Attempts(
            model,
            optimizers,
            rungs=Rungs(plans, lambda: model, lambda: optimizers, calm_steps=calm_steps),
            folder=folder,
            models=lambda: [model],
            ballast=Ballast(ballast_bytes, lambda: _device_of(model), calm_steps=calm_steps),
        )
        self.statistics = self._attempts.statistics
        self._backward = AdaptiveBackward(model, self._attempts)
        self._has_plans = bool(plans)
        # The program decides how long a loader lives, and its workers with it.
        self._batches: list[weakref.ref[ReplayedBatches[Any]]] = []

    def step(self, function: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Result:
        """Runs `function(*args, **kwargs)`, one step of the loop, to its end, and returns its result.

        Raises:
            torch.OutOfMemoryError: the step found no memory with any plan, or could not be taken back; its notes say which. What else the function raises
                is not touched.
        """
        if self._attempts.is_running:
            raise UsageError("guarded.step was called within a guarded step; guard the outer or the inner one")
        result = run_step(
            self._attempts,
            functools.partial(function, *args, **kwargs),
            {"the step": function, **{f"argument {n}": a for n, a in enumerate(args, 1)}, **kwargs},
            names_data=lambda: "data" in attributes_named_by(function),
            sources=[batches for reference in self._batches if (batches := reference()) is not None],
        )
        self.told_to_end.at_border()
        return result

    def rehearse(
        self, function: Callable[..., object], loader: DataLoader[Any], /, *args: Any, **kwargs: Any
    ) -> Rehearsal:
        """Tries `function(batch, *args, **kwargs)` on the largest batch that `loader` can give, before the first step: up to its first update, all of which is
        taken back. The data set is looked through in a forked process, for 10 s at most; random states, the loader and its data set are as before.

        Raises:
            torch.OutOfMemoryError: there is no room for its forward and backward pass, with any plan.
            ApplyError: what the function has changed cannot be taken back.
        """
        if self._attempts.is_running:
            raise UsageError("guarded.rehearse was called within a guarded step; call it before the first one")
        found = largest_batch_of(loader)
        if isinstance(found, str):
            return Rehearsal(why_not=found)
        reached = {
            "the step": function,
            "the batch": found.batch,
            **{f"argument {n}": a for n, a in enumerate(args, 2)},
        }
        plan = rehearse_step(
            self._attempts,
            functools.partial(function, found.batch, *args, **kwargs),
            reached | kwargs,
            names_data=lambda: "data" in attributes_named_by(function),
        )
        return Rehearsal(
            shapes=shapes_of(found.batch), num_seen=found.num_seen, num_examples=found.num_examples, plan=plan
        )

    def backward(
        self,
        loss_of: Callable[[Any], torch.Tensor],
        batch: Any,
        /,
        *,
        weight: Callable[[Any], Any] | None = None,
        draws_anew: bool = False,
    ) -> torch.Tensor:
        """Forward and backward pass of a batch in parts that fit: adds the gradient of the whole batch's loss to `grad`, and returns that loss.

        `loss_of(part)` is the mean loss over the examples of a part, or over as many terms as `weight(part)` says, such as tokens that count. How many
        examples go at once is found from the first batches on, on a card without an out-of-memory error on the way. With `draws_anew` a model may draw random
        numbers, which are others in parts than in the whole.

        Raises:
            UsageError: the batch cannot be split, or the gradient of two examples is not that of one and one.
            torch.OutOfMemoryError: a single example has no room.
        """
        if self._attempts.is_running:
            raise UsageError("guarded.backward was called within a guarded step; it is one itself")
        if self._has_plans:
            raise UsageError(
                "guarded.backward takes no `plans`: it finds what fits by itself; leave them out, or use guarded.step"
            )
        # Between a backward pass and the update that follows is no border of a step.
        self.told_to_end.at_border()
        return self._backward.run(loss_of, batch, weight=weight, draws_anew=draws_anew)

    @property
    def part_in_use(self) -> int:
        """How many examples `backward` runs at once now; 0 before the first batch."""
        return self._backward.in_use

    @property
    def plan_in_use(self) -> int:
        """The position in `plans` of the one that is on the model now; -1 for none."""
        return self._attempts.rungs.at

    def batches(self, loader: Iterable[Batch]) -> ReplayedBatches[Batch]:
        """An iterator over `loader` for steps that call `next` themselves: a step that is run again gets the same batches."""
        found = ReplayedBatches(loader)
        self._batches = [*(each for each in self._batches if each() is not None), weakref.ref(found)]
        return found

    def end(self) -> None:
        """Takes everything off the model and its optimizers."""
        self._attempts.end()


@contextmanager
def guard(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
    *,
    plans: Sequence[Plan | str | Path] = (),
    on_terminate: Callable[[], object] | None = None,
    post_mortems: str | Path = ".",
    calm_steps: int = CALM_STEPS,
    ballast: str | int = 0,
) -> Iterator[GuardedSteps]:
    """Guards the steps that are run by `guarded.step(function, batch)` inside of the `with` block.

    `plans` are files of `tightfit plan -o`, or `Plan` objects, from the fastest to the one that holds least: the ladder. After `calm_steps` steps without an
    error the plan before is tried again. `on_terminate` is called once, after the step that was running when the process was told to end (SIGTERM); the
    signal is then what it was before. A step that fails for good leaves a file `tightfit-out-of-memory-STEP.json` in the folder `post_mortems`
    (`-rankN-STEP` where there are several ranks).

    `ballast` ("512MiB" or bytes) is held on the model's device without need, and given up at the first error.

    Raises:
        UsageError: the model has a plan already, and `plans` were given; `ballast` is no size.
        PlanError: a file is not a plan.
    """
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    ladder = [each if isinstance(each, Plan) else Plan.load(each) for each in plans]
    if ladder and has_plan(model):
        raise UsageError(
            f"this {type(model).__name__} has a plan already: undo its session, and give the plan to guard as the first of `plans`"
        )
    guarded = GuardedSteps(
        model,
        optimizers,
        ladder,
        folder=Path(post_mortems),
        calm_steps=calm_steps,
        ballast_bytes=to_bytes(ballast, "ballast"),
        on_terminate=on_terminate,
    )
    with ended_by(guarded.told_to_end.end, guarded.end):
        if on_terminate is not None:
            guarded.told_to_end.begin()
        yield guarded
        guarded.told_to_end.at_border()


def _device_of(model: torch.nn.Module) -> torch.device | None:
    return next((parameter.device for parameter in model.parameters()), None)
