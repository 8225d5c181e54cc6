"""When the blocks of a model use their weights, in a run whose weights come one block ahead and leave afterwards.

A block is a numbered module (a layer of a list), the outermost one that is called: its weights come when it is, and a list in a list never is. Its uses are the ranges of operators of its forward passes and of its part of the
backward passes, or of its calls in a run that only predicts. Weights that are trained, or that other modules hold too, are none of the block's.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from tightfit.tape import Column, Phase

if TYPE_CHECKING:
    from tightfit.analysis.profile import Profile


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WeightUse:
    """The operators `[begin, end)` that use the weights of the block number `block`. With `is_ahead` they come beside the use before, which is one of
    another block; otherwise they come when this begins."""

    block: int
    is_backward: bool
    begin: int
    end: int
    is_ahead: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WeightBlock:
    """A block that has weights which are not trained: their storages, and its place."""

    path: str
    storages: Column


class StreamedUses:
    """The blocks of a run in the order of their first forward pass, and the uses of their weights in order; `with_trained` counts trained weights too."""

    def __init__(self, profile: "Profile", *, with_trained: bool = False) -> None:
        self._with_trained = with_trained
        self._tape = tape = profile.tape
        block_of = [_block_of(text, profile.modules.is_called) for text in tape.strings]
        paths = list(dict.fromkeys(filter(None, (block_of[m] for m in tape.weights.module.tolist()))))
        number_of = {path: number for number, path in enumerate(paths)}
        # The block of each string that is a module, -1 for none.
        of_string = np.array([number_of.get(path, -1) for path in block_of], dtype=np.int64)
        block, phase = of_string[tape.operators.module], tape.operators.phase
        self.is_prediction = not np.isin(phase, (Phase.FORWARD, Phase.BACKWARD)).any()
        """Whether nothing of the run could be trained: no module was called with gradients, and there was no backward pass."""
        phases = (Phase.OTHER,) if self.is_prediction else (Phase.FORWARD, Phase.BACKWARD)
        at = np.flatnonzero((block >= 0) & np.isin(phase, phases))
        self.uses = tuple(_ordered(_runs(at, block[at], phase[at] == Phase.BACKWARD)))
        order = list(dict.fromkeys(use.block for use in self.uses if not use.is_backward))
        self.blocks = {number: self._weights(paths[number], number, of_string) for number in order}

    def _weights(self, path: str, number: int, of_string: Column) -> WeightBlock:
        weights = self._tape.weights
        inside = of_string[weights.module] == number
        is_trained = weights.is_trained & (not (self.is_prediction or self._with_trained))
        others = set(weights.storage[~inside | is_trained].tolist())
        others |= self._of_twins(inside, is_trained)
        own = [storage for storage in np.unique(weights.storage[inside]).tolist() if storage not in others]
        return WeightBlock(path=path, storages=np.array(own, dtype=np.int64))

    def _of_twins(self, inside: Column, is_trained: Column) -> set[int]:
        """Storages that are not trained, beside trained ones of the same module and size: those of a second model of the class (a target network, a teacher, an
        average of weights), which has the same paths. A plan is put on the one that is trained."""
        weights, sizes = self._tape.weights, self._tape.storages.num_bytes
        of_module = list(zip(weights.module.tolist(), sizes[weights.storage].tolist(), strict=True))
        trained = {of_module[row] for row in np.flatnonzero(inside & is_trained).tolist()}
        frozen = np.flatnonzero(inside & ~is_trained).tolist()
        return {int(weights.storage[row]) for row in frozen if of_module[row] in trained}

    def on_card(self, block: int) -> list[tuple[int, int]]:
        """The operators `[begin, end)` during which the weights of a block are on the card or on their way to it."""
        found: list[tuple[int, int]] = []
        for index, use in enumerate(self.uses):
            if use.block != block:
                continue
            begin = self.uses[index - 1].begin if use.is_ahead else use.begin
            end = use.end
            following = self.uses[index + 1] if index + 1 < len(self.uses) else None
            if use.is_backward:
                # Until the backward pass comes to another block, or is over.
                rest = self._tape.operators.phase[use.end :] != Phase.BACKWARD
                end += int(rest.argmax()) if rest.any() else len(rest)
                end = min(end, following.begin) if following is not None else end
            found.append((begin, end))
        return found


def _block_of(module: str, is_called: Callable[[str], bool]) -> str:
    """The path of the outermost numbered module that `module` is in, or is, and that `is_called`; empty where it is in none."""
    parts = module.split(".")
    numbered = (".".join(parts[: i + 1]) for i, part in enumerate(parts) if i and part.isdigit())
    return next((path for path in numbered if is_called(path)), "")


def _runs(at: Column, block: Column, is_backward: Column) -> list[WeightUse]:
    """The ranges in which one block follows itself in one direction."""
    if not len(at):
        return []
    changes = np.flatnonzero((np.diff(block) != 0) | (np.diff(is_backward) != 0))
    begins, ends = np.r_[0, changes + 1].tolist(), np.r_[changes, len(at) - 1].tolist()
    return [
        WeightUse(block=int(block[b]), is_backward=bool(is_backward[b]), begin=int(at[b]), end=int(at[e]) + 1)
        for b, e in zip(begins, ends, strict=True)
    ]


def _ordered(uses: list[WeightUse]) -> list[WeightUse]:
    """The uses with what the one before says about them: a pass that begins, in either direction, is not waited for."""
    first = {number: place for place, number in enumerate(dict.fromkeys(use.block for use in uses))}
    found = uses[:1]
    for before, use in itertools.pairwise(uses):
        is_further = use.is_backward or first[use.block] > first[before.block]
        is_ahead = use.is_backward == before.is_backward and use.block != before.block and is_further
        found.append(dataclasses.replace(use, is_ahead=is_ahead))
    return found
