"""Puts what concerns a framework's training loop on it: Lightning's `LightningModule`, the Trainer of transformers.

These compute the loss of a batch in a method of their own, before which there is no forward of a model to wait for. So the class method that calls
it is watched, once the script has imported the framework; nothing is imported here.
"""

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from tightfit.planner.plan import Choice
from tightfit.runtime.apply import apply_to, innermost
from tightfit.techniques.session import Session

# Module, class, and how the object whose step it is and its model are found from the one that is called.
_Parts = Callable[[Any], tuple[Any, Any]]
_ENTRIES: dict[str, tuple[tuple[str, str, _Parts], ...]] = {
    "Lightning": (
        ("lightning.pytorch.strategies.strategy", "Strategy", lambda s: (s.lightning_module, s.lightning_module)),
        ("pytorch_lightning.strategies.strategy", "Strategy", lambda s: (s.lightning_module, s.lightning_module)),
    ),
    "Trainer": (("transformers.trainer", "Trainer", lambda trainer: (trainer, innermost(trainer.model))),),
}


def is_of_loop(choice: Choice) -> bool:
    """Whether a choice is put on a framework's loop, and not on a model."""
    return "loop" in choice.settings


class LoopWatch:
    """Choices that wait for a framework's loop. `on_apply` is called with each that was put on."""

    def __init__(self, choices: Sequence[Choice], on_apply: Callable[[Choice], None]) -> None:
        self._waiting = {name: [c for c in choices if c.settings["loop"] == name] for name in _ENTRIES}
        self._on_apply = on_apply
        self._met: weakref.WeakSet[Any] = weakref.WeakSet()
        self._watched: dict[str, Callable[[], None]] = {}
        self.statistics: Counter[str] = Counter()
        self.notes: list[str] = []

    def look(self) -> None:
        """Watches the loops of the frameworks that have been imported by now."""
        for name, choices in self._waiting.items():
            for module, kind, parts in _ENTRIES[name] if choices else ():
                if module in sys.modules and module not in self._watched:
                    self._watched[module] = self._watch(getattr(sys.modules[module], kind), parts, choices)

    def end(self) -> None:
        """Watches no longer; what was put on stays."""
        while self._watched:
            self._watched.popitem()[1]()

    def _watch(self, kind: type, parts: _Parts, choices: Sequence[Choice]) -> Callable[[], None]:
        training_step = kind.training_step  # type: ignore[attr-defined]

        def stepped(owner: Any, *args: Any, **kwargs: Any) -> Any:
            loop, model = parts(owner)
            if loop not in self._met:
                self._put_on(loop, model, choices)
            return training_step(owner, *args, **kwargs)

        kind.training_step = stepped  # type: ignore[attr-defined]

        def unwatch() -> None:
            kind.training_step = training_step  # type: ignore[attr-defined]

        return unwatch

    def _put_on(self, loop: Any, model: Any, choices: Sequence[Choice]) -> None:
        session = Session(model=model, optimizers=(), loop=loop, statistics=self.statistics, notes=self.notes)
        apply_to(session, choices)
        self._met.add(loop)
        for choice in choices:
            self._on_apply(choice)
