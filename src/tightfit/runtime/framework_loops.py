"""Applies choices to the training loops of frameworks: Lightning's `LightningModule`, the Trainer of transformers.

These compute the loss of a batch in a method of their own, before any forward of a model. So the framework's method that calls it is watched,
once the script has imported the framework; nothing is imported here.
"""

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from tightfit.capture.processes.process_role import begin_plan
from tightfit.planner.plan import Choice
from tightfit.runtime.apply import apply_to, innermost
from tightfit.techniques.session import Notes, Session
from tightfit.torch_hooks.calls import StepOwner, on_training_step
from tightfit.torch_hooks.manifest import LIGHTNING_STEP, PYTORCH_LIGHTNING_STEP, TRAINER_STEP, Name
from tightfit.torch_hooks.replaced import Leave
from tightfit.torch_hooks.weak_references import WeakTable

# How the object whose step it is and its model are found from the one whose method is called.
_Parts = Callable[[Any], tuple[Any, Any]]


def _of_strategy(strategy: Any) -> tuple[Any, Any]:
    return strategy.lightning_module, strategy.lightning_module


def _of_trainer(trainer: Any) -> tuple[Any, Any]:
    return trainer, innermost(trainer.model)


_ENTRIES: dict[str, dict[Name, _Parts]] = {
    "Lightning": {LIGHTNING_STEP: _of_strategy, PYTORCH_LIGHTNING_STEP: _of_strategy},
    "Trainer": {TRAINER_STEP: _of_trainer},
}


def is_of_loop(choice: Choice) -> bool:
    """Whether a choice is applied to a framework's loop, and not to a model."""
    return "loop" in choice.settings


class LoopWatch(StepOwner):
    """Choices that wait for a framework's loop. `on_apply` is called with each one that was applied."""

    def __init__(self, choices: Sequence[Choice], on_apply: Callable[[Choice], None]) -> None:
        self._waiting = {name: [c for c in choices if c.settings["loop"] == name] for name in _ENTRIES}
        self._on_apply = on_apply
        # The loops that choices were applied to. A session is kept alive by the model's own forward, and not
        # here.
        self._met: WeakTable[Any, weakref.ref[Session]] = WeakTable()
        self._watched: dict[Name, Leave] = {}
        self.statistics: Counter[str] = Counter()
        self.notes = Notes()

    def look(self) -> None:
        """Watches the loops of the frameworks that are imported by now."""
        for framework, choices in self._waiting.items():
            for name in _ENTRIES[framework] if choices else ():
                # A script imports its framework late, often after torch's first module calls: looked for at
                # each of these.
                if name.module in sys.modules and name not in self._watched:
                    self._watched[name] = on_training_step(name, self)

    def end(self) -> None:
        """Stops watching; what was applied stays."""
        while self._watched:
            self._watched.popitem()[1]()

    def before_training_step(self, name: Name, owner: Any) -> None:
        """Applies the choices to a loop that is called for the first time.

        Raises:
            ApplyError: they cannot be applied, or the session has refused something since.
        """
        for framework, choices in self._waiting.items():
            if choices and name in _ENTRIES[framework]:
                loop, model = _ENTRIES[framework][name](owner)
                met = self._met.get(loop)
                if met is None:
                    self._met[loop] = weakref.ref(self._put_on(loop, model, choices))
                elif (session := met()) is not None:
                    session.check()

    def _put_on(self, loop: Any, model: Any, choices: Sequence[Choice]) -> Session:
        begin_plan()
        session = Session(model=model, optimizers=(), loop=loop, statistics=self.statistics, notes=self.notes)
        apply_to(session, choices)
        for choice in choices:
            self._on_apply(choice)
        return session
