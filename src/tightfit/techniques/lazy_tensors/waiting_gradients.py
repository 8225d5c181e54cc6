"""The lazy gradients of one backward pass that are still wanted."""

import weakref

import torch

from tightfit.techniques.lazy_tensors.deferred_gradients import REMEDY, Deferred, deferred_gradient


class WaitingGradients:
    """Lazy gradients by their parameters; weakly, as what neither a parameter nor the program has any more is not made."""

    def __init__(self) -> None:
        self._gradients: dict[torch.Tensor, weakref.ref[Deferred]] = {}

    def add(self, parameter: torch.Tensor, deferred: Deferred) -> None:
        """The gradient of `parameter` waits."""
        self._gradients[parameter] = weakref.ref(deferred)

    @property
    def now(self) -> dict[torch.Tensor, Deferred]:
        """The gradients that are still wanted: not cleared and dropped, materialised, consumed or filled with zeros."""
        living = {parameter: deferred() for parameter, deferred in self._gradients.items()}
        return {p: deferred for p, deferred in living.items() if deferred is not None and deferred.state == "deferred"}

    def on_parameters(self) -> dict[torch.Tensor, Deferred]:
        """Those that are the gradients of their parameters. Others the program has taken off, and keeps."""
        return {p: deferred for p, deferred in self.now.items() if deferred_gradient(p) is deferred}

    def has_taken_off(self) -> bool:
        """Whether there are such that the program has taken off."""
        return len(self.now) > len(self.on_parameters())

    def give_up(self, why: str) -> None:
        """Marks them as lost: they cannot be made again."""
        for deferred in self.now.values():
            deferred.is_used(f"that cannot be computed again: {why}", is_lost=True)

    def fail(self) -> None:
        """Marks those of a backward pass that ended with an error."""
        for deferred in self.now.values():
            deferred.is_used(f"of a backward pass that raised an error; {REMEDY}", is_lost=True)
        self._gradients.clear()
