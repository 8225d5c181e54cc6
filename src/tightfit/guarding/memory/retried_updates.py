"""Runs the operators of an optimizer's step again, each by itself, where one finds no memory.

An update cannot be taken back without copies of weights and states, but it need not be: an operator that found no memory for its result has changed
nothing, and runs again when memory was freed.
"""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tightfit.guarding.memory.held_contents import HeldContents
from tightfit.guarding.memory.retried_operators import RetriedOperators
from tightfit.techniques.session import Session
from tightfit.torch_hooks.manifest import NUM_DISPATCH_MODES
from tightfit.torch_hooks.weak_references import WeakTable


class UpdateReached(BaseException):
    """A step that was to run up to its first update has come there. No `Exception`: a program may catch those."""


class UpdateRetries:
    """Puts itself around the steps of the session's optimizers. `free` is called before an operator is run again.

    With `stops_before` a step raises `UpdateReached` in place of its beginning. `is_done` is whether a step has ended since it was set to False; `half_done` says after an error which optimizer had changed some of its weights or states and not all; it is empty where none had.
    """

    def __init__(self, session: Session, free: Callable[[], object], when_begun: Callable[[], object]) -> None:
        self.num_retries = 0
        self.is_done = False
        self.half_done = ""
        self.stops_before = False
        # While no step of the loop is under way, this is the number of no stack of modes.
        self._num_modes = -1
        self._thread = 0
        self._rest: RetriedOperators | None = None
        self._free = free
        self._when_begun = when_begun
        self._session = session
        # What stands at `step` of each optimizer that is covered.
        self._covers: WeakTable[torch.optim.Optimizer, Any] = WeakTable()
        self.cover(session.optimizers)

    def cover(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Puts itself around the steps of these optimizers, where it is not: outside of what a scheduler that was made since has put there."""
        for optimizer in optimizers:
            if self._covers.get(optimizer) is not vars(optimizer).get("step", optimizer):
                self._session.set(optimizer, "step", _GuardedStep(self, optimizer))
                self._covers[optimizer] = vars(optimizer)["step"]

    @contextmanager
    def up_to_updates(self) -> Iterator[None]:
        """The step of an optimizer raises `UpdateReached` in here."""
        self.stops_before = True
        try:
            yield
        finally:
            self.stops_before = False

    def begin(self) -> None:
        """A step of the loop begins."""
        self.is_done = False
        self.half_done = ""
        self._num_modes = NUM_DISPATCH_MODES.call()
        self._thread = threading.get_ident()

    def end(self) -> None:
        """It is over, or has failed."""
        if self._rest is not None:
            rest, self._rest = self._rest, None
            if NUM_DISPATCH_MODES.call() == self._num_modes + 1:
                rest.__exit__(None, None, None)
        self._num_modes = -1

    def run(self, optimizer: torch.optim.Optimizer, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs the step; after an error that left no half of an update, the optimizer's states are those of before.

        A state that was made in this step is dropped then: it would be made anew.
        """
        if self.stops_before:
            raise UpdateReached
        self._when_begun()
        states = HeldContents(optimizer.state)
        again = RetriedOperators(self.freed)
        try:
            with again:
                result = step(*args, **kwargs)
            self._done()
            return result
        except BaseException:
            if not again.has_written:
                states.restore()
            else:
                self.half_done = f"the step of {type(optimizer).__name__} had updated some of its weights, and not all"
            raise

    def _done(self) -> None:
        """After an update the step of the loop cannot be taken back any more: what is left of it is run like the update itself.

        Not inside of a mode of the program's own that was entered since, which would be left before ours, nor in another thread than the step's, which has
        modes of its own.
        """
        self.is_done = True
        is_here = self._thread == threading.get_ident()
        if self._rest is None and is_here and NUM_DISPATCH_MODES.call() == self._num_modes:
            rest = RetriedOperators(self.freed)
            rest.__enter__()
            self._rest = rest

    def freed(self) -> None:
        """Frees memory for an operator that is run again."""
        self.num_retries += 1
        self._free()


class _GuardedStep:
    """The `step` of one optimizer."""

    def __init__(self, retries: UpdateRetries, optimizer: torch.optim.Optimizer) -> None:
        self._retries = retries
        self._optimizer = weakref.ref(optimizer)
        # That of a scheduler, which counts its calls, or of the class.
        self._former = vars(optimizer).get("step")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        optimizer = self._optimizer()
        assert optimizer is not None
        return self._retries.run(optimizer, self._step(), args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step(), name)

    def _step(self) -> Any:
        optimizer = self._optimizer()
        return self._former or type(optimizer).step.__get__(optimizer)  # type: ignore[union-attr]
