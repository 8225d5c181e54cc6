"""Data loaders that begin in the middle of a step: what they draw their order from is taken back with the step."""

from collections.abc import Callable

from tightfit.effects.state import Snapshot, again, differences, restore, snapshot_of_arguments
from tightfit.torch_hooks.loaders import Loader, on_loader_begin

_PARTS = ("generator", "sampler", "batch_sampler", "dataset")


class BegunLoaders:
    """The loaders that have begun since `clear`. What begins while `is_drawing` is not taken back: its batches are handed out again."""

    def __init__(self, is_drawing: Callable[[], bool]) -> None:
        self._is_drawing = is_drawing
        self._before: list[Snapshot] = []
        self.end = on_loader_begin(self)
        """Ends the watch."""

    def before_loader_begins(self, loader: Loader) -> None:
        """A loader begins to hand out batches."""
        if not self._is_drawing():
            self._before.append(snapshot_of_arguments({part: getattr(loader, part, None) for part in _PARTS}))

    def clear(self) -> None:
        """A step begins, or is over."""
        self._before.clear()

    def obstacle(self) -> str:
        """What the loaders have changed and cannot be put back; empty if all can."""
        changes = (change for before in self._before for change in differences(before, again(before)))
        return next((f"the {change} of a data loader" for change in changes if change.is_in_place), "")

    def restore(self) -> None:
        """Puts back what they have changed."""
        # From the last one to the first, which may be the same loader twice.
        for before in reversed(self._before):
            restore(before)
        self.clear()
