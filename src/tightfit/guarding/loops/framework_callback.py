"""What the guards of the frameworks' trainers have in common: their settings, and when they end. No framework is imported."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tightfit.guarding.loops.framework_steps import FrameworkGuard, GuardSettings
from tightfit.guarding.rungs import CALM_STEPS
from tightfit.planner.plan import Plan
from tightfit.torch_hooks.manifest import Name


class FrameworkCallback:
    """Beside the class of a framework for its callbacks. `statistics` counts steps, errors and replays."""

    def __init__(
        self,
        *,
        plans: Sequence[Plan | str | Path] = (),
        on_terminate: Callable[[], object] | None = None,
        post_mortems: str | Path = ".",
        calm_steps: int = CALM_STEPS,
        ballast: str | int = 0,
    ) -> None:
        self.statistics: Counter[str] = Counter()
        settings = GuardSettings(
            plans=plans, on_terminate=on_terminate, post_mortems=post_mortems, calm_steps=calm_steps, ballast=ballast
        )
        # A file that is no plan is an error here, and not when training begins.
        self._settings = dataclasses.replace(settings, plans=settings.ladder())
        self._guard: FrameworkGuard | None = None

    def _begin(self, name: Name, model: Any, optimizers: Sequence[Any]) -> None:
        """Training begins, in which the framework calls the method `name` for each batch."""
        # One that an error has ended may have told nobody.
        self._end()
        self._guard = FrameworkGuard(name, self, model, optimizers, settings=self._settings)
        self.statistics = self._guard.statistics

    def _at_border(self) -> None:
        """A batch is over, and its update, if it has one."""
        if self._guard is not None:
            self._guard.told_to_end.at_border()

    def _end(self, why_unguarded: str = "") -> None:
        """Takes everything off; says why no batch was guarded, where that is so."""
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.end(why_unguarded)
