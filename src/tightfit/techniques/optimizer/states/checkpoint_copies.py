"""Copies of an encoded state in checkpoints in memory: `optimizer.state_dict()` gives the states themselves in the plain run, so each follows the other.

What an update writes is copied to them. What the program writes to one of them (to reset a moment) is taken over when the state is next asked for: it is told
by the version of the copy and, where states are kept exactly, by the bits too, since writes through `.data` or NumPy have no version.
"""

import weakref
from collections.abc import Iterator

import torch

from tightfit.effects.values.value_checks import has_values


class CheckpointCopies:
    """The copies of one state that are alive, each with the version that it had when it was the state."""

    def __init__(self) -> None:
        self._copies: list[tuple[weakref.ref[torch.Tensor], int]] = []
        # Up to the next update: the program may write to a copy and drop it, as it drops a state that it was given.
        self._kept: list[torch.Tensor] = []

    def __bool__(self) -> bool:
        return any(True for _ in self._alive())

    def add(self, copied: torch.Tensor) -> None:
        """One more, which is the state now."""
        self._kept.append(copied)
        self._copies.append((weakref.ref(copied), copied._version))

    def the_one(self, copied: torch.Tensor) -> torch.Tensor:
        """What a checkpoint has as the state: a copy that is there already, as the plain run gives the same tensor each time, or else `copied`, which is one from now on."""
        there = next(self._alive(), None)
        if there is not None:
            return there[0]
        self.add(copied)
        return copied

    def refresh(self, whole: torch.Tensor) -> None:
        """Has all of them be `whole`."""
        alive = [copied for copied, _ in self._alive()]
        self._copies.clear()
        for copied in alive:
            with torch.no_grad():
                copied.copy_(whole)
            self.add(copied)
        self._kept.clear()

    def written(self, whole: torch.Tensor, *, is_exact: bool) -> torch.Tensor | None:
        """The first of them that the program has written to since it was the state, which is `whole`."""
        for copied, version in self._alive():
            if copied._version != version:
                return copied
            if is_exact and has_values(copied, whole) and not _same(copied, whole):
                return copied
        return None

    def _alive(self) -> Iterator[tuple[torch.Tensor, int]]:
        for reference, version in self._copies:
            copied = reference()
            if copied is not None:
                yield copied, version


def _same(copied: torch.Tensor, whole: torch.Tensor) -> bool:
    found = whole.to(copied.device)
    # What is not a number is not equal to itself.
    return bool(torch.equal(copied, found)) or bool(((copied == found) | (copied.isnan() & found.isnan())).all())
