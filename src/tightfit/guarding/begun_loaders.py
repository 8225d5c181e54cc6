"""Data loaders that hand out batches in the middle of a step: what they draw their order from is taken back with the step.

A loader that began before the step cannot be asked for a batch again: a step that has got one from it otherwise than by what hands it out again is
not taken back.
"""

from collections.abc import Callable, Iterator
from typing import Any

from tightfit.effects.state import Snapshot, again, differences, restore, snapshot_of_arguments
from tightfit.torch_hooks.loader_calls import Loader, on_loaders
from tightfit.torch_hooks.weak_references import WeakTable

_PARTS = ("generator", "sampler", "batch_sampler", "dataset", "collate_fn")


class BegunLoaders:
    """The loaders that have begun since `clear`. What begins while `is_drawing` is not taken back: its batches are handed out again."""

    def __init__(self, is_drawing: Callable[[], bool]) -> None:
        self._is_drawing = is_drawing
        self._before: list[Snapshot] = []
        self._begun: WeakTable[Iterator[Any], None] = WeakTable()
        self._lost = ""
        self.end = on_loaders(self)
        """Ends the watch."""

    def before_loader_begins(self, loader: Loader) -> None:
        """A loader begins to hand out batches."""
        if not self._is_drawing():
            self._before.append(snapshot_of_arguments({part: getattr(loader, part, None) for part in _PARTS}))

    def after_loader_began(self, loader: Loader, batches: Iterator[Any]) -> None:
        """It has begun."""
        if self._is_drawing():
            return
        self._begun[batches] = None
        if loader.num_workers and loader.persistent_workers:
            self._lost = "workers of a data loader that it began anew, which have random states of their own"

    def before_batch(self, batches: Iterator[Any]) -> None:
        """A batch is asked for."""
        if not self._is_drawing() and batches not in self._begun:
            self._lost = "a batch that it got from a data loader, which cannot be asked for it again"

    def clear(self) -> None:
        """A step begins, or is over."""
        self._before.clear()
        self._lost = ""
        if len(self._begun):
            self._begun = WeakTable()

    def obstacle(self) -> str:
        """What the loaders have changed and cannot be put back; empty if all can."""
        changes = (change for before in self._before for change in differences(before, again(before)))
        return next((f"the {change} of a data loader" for change in changes if change.is_in_place), self._lost)

    def restore(self) -> None:
        """Puts back what they have changed."""
        # From the last one to the first, which may be the same loader twice.
        for before in reversed(self._before):
            restore(before)
        self.clear()
