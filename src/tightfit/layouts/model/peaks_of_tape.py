"""Peaks of what a tape allocates, of parts of it and around its update."""

import numpy as np

from tightfit.analysis.profile import Profile
from tightfit.cost.steps import step_operators
from tightfit.tape import Category, Column, Phase


class PeaksOfTape:
    """Peaks of the bytes of some storages of a tape, and what is there at some moments of its last step."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._tape, self._calls = profile.tape, profile.modules

    def of_category(self, category: Category) -> int:
        """The peak of what is allocated of one category."""
        chosen = np.flatnonzero(self._tape.storages.category == category)
        return self.between(chosen, 0, len(self._tape.events))

    def between(self, chosen: Column, begin: int, end: int) -> int:
        """The peak of the bytes of `chosen` storages between two events."""
        change = np.zeros(len(self._tape.events) + 1, dtype=np.int64)
        np.add.at(change, self._profile.lifetimes.allocated_at[chosen], self._calls.lifetimes.block_bytes[chosen])
        np.subtract.at(change, self._calls.lifetimes.freed_at[chosen], self._calls.lifetimes.block_bytes[chosen])
        return int(np.cumsum(change)[begin : max(begin + 1, end)].max(initial=0))

    def _last_step(self) -> tuple[int, int]:
        steps = step_operators(self._tape)
        return steps[-1] if steps else (0, len(self._tape.operators))

    def update_bytes(self) -> int:
        """The peak of what the update itself allocates and frees again, and what is done to gradients before it."""
        begin, end = self._last_step()
        storages, phase = self._tape.storages, self._tape.operators.phase
        at = np.arange(len(phase))
        of_update = (at >= begin) & (at < end) & ((phase == Phase.OPTIMIZER) | (phase == Phase.OTHER))
        made = np.flatnonzero(np.isin(storages.operator, at[of_update]) & (storages.category == Category.TEMPORARIES))
        return self.between(made, *(int(self._calls.lifetimes.event_of(i)) for i in (begin, end)))

    def early_gradients(self, gradients: int) -> float:
        """The share of the gradients that is there when the first backward pass of a step begins."""
        begin, end = self._last_step()
        backward = np.flatnonzero(self._tape.operators.phase[begin:end] == Phase.BACKWARD)
        if not len(backward) or not gradients:
            return 0.0
        event = int(self._calls.lifetimes.event_of(begin + int(backward[0])))
        lifetimes = self._profile.lifetimes
        there = (
            (self._tape.storages.category == Category.GRADIENTS)
            & (lifetimes.allocated_at < event)
            & (self._calls.lifetimes.freed_at >= event)
        )
        return min(1.0, lifetimes.bytes_of(np.flatnonzero(there)) / gradients)

    def working(
        self, forward: Column, backward: Column, fixed: Column, fixed_back: Column, *, is_block: bool
    ) -> tuple[int, int]:
        """The peak of what a part's passes allocate and free again: of tokens, and of what is as large as its weights whatever the batch (gradients before they are
        converted, a table's whole gradient). `fixed` are the bytes of weights that each operator writes."""
        made_by, found = self._tape.storages.operator, [(0, 0)]
        for chosen, of, without in (
            (backward, fixed_back, self._tape.storages.category == Category.GRADIENTS),
            (forward, fixed, self._calls.saved_for_backward),
        ):
            # What a block's forward pass needs is less than what its backward pass does.
            if not len(chosen) or (of is fixed and is_block):
                continue
            made = np.flatnonzero(np.isin(made_by, chosen) & ~without)
            is_fixed = of[np.searchsorted(chosen, made_by[made])] >= self._tape.storages.num_bytes[made]
            begin, end = (int(self._calls.lifetimes.event_of(int(i))) for i in (chosen[0], chosen[-1] + 1))
            found.append((self.between(made[~is_fixed], begin, end), self.between(made[is_fixed], begin, end)))
        return max(found, key=sum)
