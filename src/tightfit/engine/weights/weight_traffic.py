"""Moves single weights and their gradients to the card and away, and counts the bytes."""

from collections import Counter
from collections.abc import Callable

from tightfit.engine.copy_engines import CopyEngine
from tightfit.engine.weights.streamed_gradient import StreamedGradient
from tightfit.engine.weights.streamed_weight import Residence, StreamedWeight


class WeightTraffic:
    """The copies of weights by `copies`; `statistics` counts what is moved, `when_unchanged` is called as `StreamedWeights` says."""

    def __init__(
        self, copies: CopyEngine, statistics: Counter[str], when_unchanged: Callable[[StreamedWeight], object]
    ) -> None:
        self.copies = copies
        self._statistics = statistics
        self._when_unchanged = when_unchanged
        self._leaving: list[StreamedGradient] = []

    def fetch(self, weight: StreamedWeight) -> None:
        """Begins to bring a weight from the host."""
        weight.fetch(self.copies)
        self._statistics["weight bytes to the card"] += weight.num_bytes

    def have(self, weight: StreamedWeight) -> None:
        """Has a weight on the card, for what is computed from now on."""
        if weight.residence is Residence.HOST:
            self.fetch(weight)
        if weight.residence is Residence.COMING:
            weight.arrive(self.copies)

    def have_gradient(self, weight: StreamedWeight) -> None:
        """Has its gradient on the card, if there is one."""
        if weight.gradient is not None:
            moved = weight.gradient.come(self.copies)
            if moved:
                self._statistics["gradient bytes to the card"] += moved

    def drop(self, weight: StreamedWeight) -> None:
        """Gives a weight's memory on the card back, and begins to have its gradient leave."""
        if weight.residence is Residence.COMING:
            weight.forget_copy(self.copies)
        if weight.residence is Residence.CARD:
            if not weight.data.was_written:
                self._when_unchanged(weight)
            if weight.gradient is not None:
                self.begin_to_leave(weight.gradient)
            if weight.leave(self.copies):
                self._statistics["weight bytes to the host"] += weight.num_bytes

    def begin_to_leave(self, gradient: StreamedGradient) -> None:
        """Begins to copy a gradient to the host."""
        gradient.begin_to_leave(self.copies)
        if gradient.is_leaving:
            self._leaving.append(gradient)

    def gradients_leave(self) -> None:
        """Frees the memory on the card of gradients whose copies have begun."""
        leaving, self._leaving = self._leaving, []
        for gradient in leaving:
            self._statistics["gradient bytes to the host"] += gradient.leave(self.copies)
