"""`guard`: runs the steps of a training loop so that an out-of-memory error in one of them does not end the run.

    with tightfit.guard(model, optimizer, plans=["fast.json", "small.json"]) as guarded:
        for batch in loader:
            loss = guarded.step(train_step, batch)

A step that finds no memory is taken back to its beginning (weights, buffers, gradients, random states, whatever it has changed), memory is freed, and
it is run again: first as it was, then with the next plan of the ladder. Its result is the plain step's. A step that cannot be taken back ends with
the error it had, and says why.
"""

import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch

from tightfit.errors import OutputError, TightfitError, UsageError
from tightfit.guarding.out_of_memory import is_out_of_memory, release_memory, without_frames
from tightfit.guarding.post_mortem import bytes_by_holder, explain, write_post_mortem
from tightfit.guarding.replayed_batches import Batch, ReplayedBatches
from tightfit.guarding.retried_updates import UpdateRetries
from tightfit.guarding.rungs import Rungs
from tightfit.guarding.scalers import ScalerStates
from tightfit.guarding.step_state import StepBeginning, StepStates
from tightfit.planner.plan import Plan
from tightfit.runtime.apply import has_plan
from tightfit.techniques.session import Session
from tightfit.torch_hooks.backward import on_backward

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
        on_terminate: Callable[[], object] | None,
    ) -> None:
        self.statistics: Counter[str] = Counter()
        self._model = model
        self._optimizers = optimizers
        self._folder = folder
        self._on_terminate = on_terminate
        self._session = Session(model=model, optimizers=optimizers)
        self._rungs = Rungs(plans, model, optimizers)
        self._states = StepStates(model, optimizers)
        self._retries = UpdateRetries(self._session, release_memory, self._learn)
        self._batches: list[ReplayedBatches[Any]] = []
        self._beginning: StepBeginning | None = None
        self._is_told_to_end = False
        self._num_steps = 0

    def step(self, function: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Result:
        """Runs `function(*args, **kwargs)`, one step of the loop, to its end, and returns its result.

        Raises:
            torch.OutOfMemoryError: the step found no memory with any plan, or could not be taken back; its notes say which. What else the function raises
                is not touched.
        """
        if self._beginning is not None:
            raise UsageError("guarded.step was called within a guarded step; guard the outer or the inner one")
        self._num_steps += 1
        tried: list[str] = []
        while True:
            scalers = ScalerStates(function, args, kwargs)
            beginning = self._states.begin(function, args, kwargs)
            for batches in self._batches:
                batches.begin()
            leave = on_backward(beginning.gradients)
            self._beginning = beginning
            self._retries.begin()
            try:
                result = function(*args, **kwargs)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                failure = without_frames(error)
            else:
                if not self._retries.is_done:
                    self._learn()
                self._succeeded()
                return result
            finally:
                self._beginning = None
                self._retries.end()
                leave()
            # Outside of the handler: its frames hold the activations of the failed step.
            self._take_back(beginning, scalers, failure, tried)
            del beginning, failure

    def batches(self, loader: Iterable[Batch]) -> ReplayedBatches[Batch]:
        """An iterator over `loader` for steps that call `next` themselves: a step that is run again gets the same batches."""
        found = ReplayedBatches(loader)
        self._batches.append(found)
        return found

    def end(self) -> None:
        """Takes everything off the model and its optimizers."""
        self._rungs.end()
        self._session.undo()
        self.statistics["retried operators"] = self._retries.num_retries

    def _learn(self) -> None:
        if self._beginning is not None:
            self._states.learn(self._beginning)

    def _succeeded(self) -> None:
        self.statistics["steps"] += 1
        if self._rungs.step_succeeded():
            self.statistics["climbs"] += 1
        if self._is_told_to_end:
            self._is_told_to_end = False
            assert self._on_terminate is not None
            self._on_terminate()

    def _take_back(
        self, beginning: StepBeginning, scalers: ScalerStates, error: BaseException, tried: list[str]
    ) -> None:
        """Restores the state at the beginning of the step, and frees memory for the next trial."""
        self.statistics["out of memory"] += 1
        why_not = "weights had been updated in it already" if self._retries.is_done else ""
        why_not = why_not or self._retries.half_done or _many_processes() or self._states.obstacle(beginning)
        if why_not:
            raise self._final(error, tried, f"the step could not be run again: {why_not}")
        beginning.restore()
        scalers.restore()
        if left := [change for change in beginning.changes(self._states.now(beginning)) if not change.is_in_place]:
            raise self._final(error, tried, f"the step could not be run again: {left[0]}")
        for batches in self._batches:
            batches.again()
        release_memory()
        if not tried:
            tried.append("released memory")
        elif not self._go_down(tried):
            raise self._final(error, tried, "no plan that holds less is left")
        self.statistics["replays"] += 1

    def _go_down(self, tried: list[str]) -> bool:
        while True:
            try:
                if not self._rungs.go_down():
                    return False
            except TightfitError as error:
                tried.append(f"plan {self._rungs.at + 2}: {error}")
                return False
            tried.append(f"plan {self._rungs.at + 1}")
            return True

    def _final(self, error: BaseException, tried: Sequence[str], why: str) -> BaseException:
        release_memory()
        held = bytes_by_holder([self._model], self._optimizers)
        notes = [f"tightfit: step {self._num_steps}: {why}", f"tightfit: {explain(held)}"]
        if tried:
            notes.append("tightfit: tried: " + "; ".join(tried))
        try:
            path = write_post_mortem(
                self._folder,
                error,
                step=self._num_steps,
                tried=[*tried, why],
                models=[self._model],
                optimizers=self._optimizers,
            )
            notes.append(f"tightfit: more in {path}")
        except OutputError as failed:
            notes.append(f"tightfit: {failed}")
        for note in notes:
            error.add_note(note)
        return error

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        # At the next border of a step; a handler runs between any two instructions.
        self._is_told_to_end = True


@contextmanager
def guard(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
    *,
    plans: Sequence[Plan | str | Path] = (),
    on_terminate: Callable[[], object] | None = None,
    post_mortems: str | Path = ".",
) -> Iterator[GuardedSteps]:
    """Guards the steps that are run by `guarded.step(function, batch)` inside of the `with` block.

    `plans` are files of `tightfit plan -o`, or `Plan` objects, from the fastest to the one that holds least: the ladder. After a hundred steps without an
    error the plan before is tried again. `on_terminate` is called once, after the step that was running when the process was told to end (SIGTERM); the
    signal is then what it was before. A step that fails for good leaves a file `tightfit-out-of-memory-STEP.json` in the folder `post_mortems`.

    Raises:
        UsageError: the model has a plan already, and `plans` were given.
        PlanError: a file is not a plan.
    """
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    ladder = [each if isinstance(each, Plan) else Plan.load(each) for each in plans]
    if ladder and has_plan(model):
        raise UsageError(
            f"this {type(model).__name__} has a plan already: undo its session, and give the plan to guard as the first of `plans`"
        )
    guarded = GuardedSteps(model, optimizers, ladder, folder=Path(post_mortems), on_terminate=on_terminate)
    try:
        with _on_sigterm(guarded._terminate if on_terminate else None):
            yield guarded
    finally:
        guarded.end()


@contextmanager
def _on_sigterm(handler: Callable[[int, FrameType | None], object] | None) -> Iterator[None]:
    if handler is None:
        yield
        return
    if threading.current_thread() is not threading.main_thread():
        raise UsageError("on_terminate needs the main thread: Python handles signals there alone")
    former = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


def _many_processes() -> str:
    """Why a step of several processes is not run again; empty for one process."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        return "other processes take part in it, and would wait for this one"
    return ""
