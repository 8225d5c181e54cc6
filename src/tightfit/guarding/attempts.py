"""Attempts at a step: each begins with what is needed to take it back, and one that finds no memory is taken back or refused."""

import dataclasses
import gc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tightfit.errors import OutputError
from tightfit.guarding.ballast import Ballast
from tightfit.guarding.begun_loaders import BegunLoaders
from tightfit.guarding.out_of_memory import drop_failed_backward, is_out_of_memory, release_memory
from tightfit.guarding.post_mortem import bytes_by_holder, explain, write_post_mortem
from tightfit.guarding.replayed_batches import ReplayedBatches
from tightfit.guarding.retried_operators import RetriedOperators
from tightfit.guarding.retried_updates import UpdateRetries
from tightfit.guarding.rungs import Rungs
from tightfit.guarding.step_state import StepBeginning, StepStates
from tightfit.techniques.session import Session
from tightfit.torch_hooks.backward import on_backward
from tightfit.torch_hooks.replaced import Leave

_RELEASED = "released memory"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt at a step, from its beginning on. `leave` ends the watch for its backward passes."""

    beginning: StepBeginning
    sources: Sequence[ReplayedBatches[Any]]
    leave: Leave


class Attempts:
    """Begins, ends and takes back attempts. `statistics` counts what was done.

    `models` and `optimizers` are for the post-mortem; without a `model`, those that steps reach are watched.
    """

    def __init__(
        self,
        model: torch.nn.Module | None,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        rungs: Rungs,
        folder: Path,
        models: Callable[[], Sequence[torch.nn.Module]],
        ballast: Ballast,
    ) -> None:
        self.statistics: Counter[str] = Counter()
        self.num_steps = 0
        self._optimizers = optimizers
        self._models = models
        self._folder = folder
        self._session = Session(model=model or torch.nn.Module(), optimizers=optimizers)
        self._rungs = rungs
        self._ballast = ballast
        self._states = StepStates(model, optimizers)
        self._retries = UpdateRetries(self._session, self._free, self._learn)
        self._running: Attempt | None = None
        self._loaders = BegunLoaders(self._is_drawing)

    @property
    def is_running(self) -> bool:
        """Whether a step is under way."""
        return self._running is not None

    @property
    def plan_in_use(self) -> int:
        """The position of the plan that is on; -1 for none."""
        return self._rungs.at

    def begin(
        self,
        reached: Mapping[str, Any],
        *,
        attributes: frozenset[str] = frozenset(),
        names_data: Callable[[], bool],
        sources: Sequence[ReplayedBatches[Any]] = (),
    ) -> Attempt:
        """A step begins that reaches these values by name, and `attributes` of Python modules among them.

        Raises:
            ApplyError: a plan could not be taken off before, and the model is in parts.
        """
        self._rungs.begin()
        self._ballast.hold()
        self._retries.cover(self._optimizers)
        with RetriedOperators(self._retries.freed):
            beginning = self._states.begin(reached, attributes=attributes, names_data=names_data)
        for batches in sources:
            batches.begin()
        attempt = Attempt(beginning=beginning, sources=sources, leave=on_backward(beginning.gradients))
        self._running = attempt
        self._loaders.clear()
        self._retries.begin()
        return attempt

    def leave(self, attempt: Attempt) -> None:
        """The attempt is over, whatever its end."""
        self._running = None
        self._retries.end()
        attempt.leave()

    def succeeded(self, attempt: Attempt) -> None:
        """It came to its end, and is not left yet."""
        if not self._retries.is_done:
            with RetriedOperators(self._retries.freed):
                self._states.learn(attempt.beginning)
        self.statistics["steps"] += 1

    def are_taken_back_after(self, error: BaseException) -> bool:
        """Whether a step that ends with this error is to be run again: memory ran out, or a plan of the ladder cannot be used for it."""
        return is_out_of_memory(error) or self._rungs.refuses(error)

    def climb(self) -> None:
        """After enough good steps, tries the plan before. Only between steps."""
        self._ballast.step_succeeded()
        if self._rungs.step_succeeded():
            self.statistics["climbs"] += 1

    def take_back(
        self, attempt: Attempt, error: BaseException, tried: list[str], *, refusal: Callable[[], str] = lambda: ""
    ) -> None:
        """Restores the state at the beginning of the step, and frees memory for the next trial. `refusal` says why not, where the caller knows.

        Raises:
            BaseException: `error`, if the step cannot be taken back, or nothing is left to be tried; its notes say which.
        """
        is_refusal = self._rungs.refuses(error)
        self.statistics["refused plans" if is_refusal else "out of memory"] += 1
        # What is looked at and restored needs some memory as well.
        with RetriedOperators(self._retries.freed):
            if why_not := self._why_not(attempt, refusal) or self._restore(attempt):
                why = f"the step could not be run again: {why_not}"
                if is_refusal:
                    error.add_note(f"tightfit: {why}")
                    raise error
                raise self.final(error, tried, why)
            drop_failed_backward()
        if is_refusal:
            release_memory()
            self._rungs.leave_refused(error, tried)
        elif self._ballast.release():
            # To torch's cache, where the next attempt finds it, and not to the driver, where other processes would.
            gc.collect()
            self.statistics["ballast released"] += 1
            tried.append("released the ballast")
        else:
            release_memory()
            if _RELEASED not in tried:
                tried.append(_RELEASED)
            elif not self._rungs.try_next(tried):
                raise self.final(error, tried, "no plan that holds less is left")
        self.statistics["replays"] += 1

    @contextmanager
    def up_to_updates(self) -> Iterator[None]:
        """The step of an optimizer raises `UpdateReached` in here."""
        self._retries.stops_before = True
        try:
            yield
        finally:
            self._retries.stops_before = False

    def undo(self, attempt: Attempt) -> str:
        """Restores the state at the beginning of an attempt that has come to its end; why that cannot be done, empty if it was."""
        with RetriedOperators(self._free):
            why_not = self._why_not(attempt, lambda: "") or self._restore(attempt)
        release_memory()
        return why_not

    def to_the_top(self) -> None:
        """Puts the first plan of the ladder that can be used on again, or takes the present one off where it ends above all plans."""
        self._rungs.to_the_top()

    def _why_not(self, attempt: Attempt, refusal: Callable[[], str]) -> str:
        """Why the state at the beginning cannot be restored; empty if it can."""
        why_not = "weights had been updated in it already" if self._retries.is_done else ""
        why_not = why_not or self._retries.half_done or _many_processes() or refusal() or self._loaders.obstacle()
        if any(batches.is_broken for batches in attempt.sources):
            why_not = why_not or "the error was raised while a batch was made, and what makes it cannot be asked again"
        return why_not or self._states.obstacle(attempt.beginning)

    def _restore(self, attempt: Attempt) -> str:
        """Restores the state at the beginning; what is not restored for all that, empty if nothing."""
        beginning = attempt.beginning
        beginning.restore()
        if left := [change for change in beginning.changes(self._states.now(beginning)) if not change.is_in_place]:
            return str(left[0])
        self._loaders.restore()
        for batches in attempt.sources:
            batches.again()
        return ""

    def final(self, error: BaseException, tried: Sequence[str], why: str) -> BaseException:
        """The error with notes that say what was tried, after a post-mortem was written."""
        release_memory()
        models = self._models()
        notes = [
            f"tightfit: step {self.num_steps}: {why}",
            f"tightfit: {explain(bytes_by_holder(models, self._optimizers))}",
        ]
        if tried:
            notes.append("tightfit: tried: " + "; ".join(tried))
        try:
            path = write_post_mortem(
                self._folder,
                error,
                step=self.num_steps,
                tried=[*tried, why],
                models=models,
                optimizers=self._optimizers,
            )
            notes.append(f"tightfit: more in {path}")
        except OutputError as failed:
            notes.append(f"tightfit: {failed}")
        for note in notes:
            error.add_note(note)
        return error

    def end(self) -> None:
        """Takes everything off the models and optimizers."""
        self._ballast.release()
        self._rungs.end()
        self._session.undo()
        self._loaders.end()
        self.statistics["retried operators"] = self._retries.num_retries

    def _free(self) -> None:
        """Frees memory for an operator that is run again."""
        self._ballast.release()
        release_memory()

    def _is_drawing(self) -> bool:
        running = self._running
        return running is None or any(source.is_drawing for source in running.sources)

    def _learn(self) -> None:
        if self._running is not None:
            with RetriedOperators(self._retries.freed):
                self._states.learn(self._running.beginning)


def _many_processes() -> str:
    """Why a step of several processes is not run again; empty for one process."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        return "other processes take part in it, and would wait for this one"
    return ""
