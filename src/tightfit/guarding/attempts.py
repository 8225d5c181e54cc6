"""Attempts at a step: each begins with what is needed to take it back, and one that finds no memory is taken back or refused."""

import gc
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tightfit.capture.processes.process_role import begin_plan
from tightfit.effects.state import Snapshot
from tightfit.errors.ends import end_all
from tightfit.guarding.memory.ballast import Ballast
from tightfit.guarding.memory.out_of_memory import drop_failed_backward, is_out_of_memory, release_memory
from tightfit.guarding.memory.post_mortem import PostMortem
from tightfit.guarding.memory.retried_operators import RetriedOperators
from tightfit.guarding.replayed_batches import ReplayedBatches
from tightfit.guarding.restoration import Attempt, Restoration
from tightfit.guarding.rungs import Rungs
from tightfit.techniques.session import Session

_RELEASED = "released memory"


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
        self.rungs = rungs
        self.post_mortem = PostMortem(folder, models, optimizers, rungs.plans)
        begin_plan()
        self._session = Session(model=torch.nn.Module() if model is None else model, optimizers=optimizers)
        self._ballast = ballast
        self._restoration = Restoration(model, optimizers, self._session, ballast.release_all)
        self.updates = self._restoration.updates

    @property
    def is_running(self) -> bool:
        """Whether a step is under way."""
        return self._restoration.is_running

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
        self.rungs.begin()
        self._ballast.hold()
        return self._restoration.begin(reached, attributes=attributes, names_data=names_data, sources=sources)

    def leave(self, attempt: Attempt) -> None:
        """The attempt is over, whatever its end."""
        self._restoration.leave(attempt)

    def succeeded(self, attempt: Attempt) -> None:
        """It came to its end, and is not left yet."""
        if not self.updates.is_done:
            self._restoration.learn(attempt)
        self.statistics["steps"] += 1

    def are_taken_back_after(self, error: BaseException) -> bool:
        """Whether a step that ends with this error is to be run again: memory ran out, or a plan of the ladder cannot be used for it."""
        return is_out_of_memory(error) or self.rungs.refuses(error)

    def climb(self) -> None:
        """After enough good steps, tries the plan before. Only between steps."""
        self._ballast.step_succeeded()
        if self.rungs.step_succeeded():
            self.statistics["climbs"] += 1

    def take_back(
        self,
        attempt: Attempt,
        error: BaseException,
        tried: list[str],
        *,
        refusal: Callable[[], str] = lambda: "",
        lower: Callable[[BaseException], str] = lambda _: "",
    ) -> None:
        """Restores the state at the beginning of the step, and frees memory for the next trial. `refusal` says why not, where the caller knows; `lower` makes
        the step smaller, and says how.

        Raises:
            BaseException: `error`, if the step cannot be taken back, or nothing is left to be tried; its notes say which.
        """
        is_refusal = self.rungs.refuses(error)
        self.statistics["refused plans" if is_refusal else "out of memory"] += 1
        # What is looked at and restored needs some memory as well.
        with RetriedOperators(self.updates.freed):
            if why_not := self._restoration.restore(attempt, refusal):
                why = f"the step could not be run again: {why_not}"
                if is_refusal:
                    error.add_note(f"tightfit: {why}")
                    raise error
                raise self.post_mortem.added_to(error, step=self.num_steps, tried=tried, why=why)
            drop_failed_backward()
        if is_refusal:
            release_memory()
            self.rungs.leave_refused(error, tried)
        elif self._ballast.release():
            # To torch's cache, where the next attempt finds it, and not to the driver, where other processes would.
            gc.collect()
            self.statistics["ballast released"] += 1
            tried.append("released the ballast")
        else:
            release_memory()
            if lowered := lower(error):
                tried.append(lowered)
            elif _RELEASED not in tried:
                tried.append(_RELEASED)
            elif not self.rungs.try_next(tried):
                raise self.post_mortem.added_to(
                    error, step=self.num_steps, tried=tried, why="no plan that holds less is left"
                )
        self.statistics["replays"] += 1

    def undo(self, attempt: Attempt) -> str:
        """Restores the state at the beginning of an attempt that has come to its end; why that cannot be done, empty if it was."""
        with RetriedOperators(self._ballast.release_all):
            why_not = self._restoration.restore(attempt)
        release_memory()
        return why_not

    def now(self, attempt: Attempt) -> list[Snapshot]:
        """The state now, of what the attempt reaches."""
        return self._restoration.now(attempt)

    def end(self) -> None:
        """Takes everything off the models and optimizers."""
        self.statistics["retried operators"] = self.updates.num_retries
        end_all(self._ballast.release, self.rungs.end, self._session.undo, self._restoration.end)
