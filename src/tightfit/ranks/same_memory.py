"""Outputs of a model that are no new tensors: weights, buffers, what it was called with, one tensor under two names, and views of these.

The program writes to them (a temperature is clamped), reads them after the update and asks which they are. What is there on each rank as a whole is handed over as it is; of what has to be
put together from the parts a write is refused that a plain run would show under another name.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from tightfit.effects.values.shared_memory import OneMemory, overlap, storage_of
from tightfit.ranks.rank_batch import RankBatch
from tightfit.ranks.values.divided_outputs import Kind


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The outputs of a part by their positions: those that are handed over as they `are`, those that are the one at another position `again`, and those that are to be `joined`."""

    are: dict[int, torch.Tensor]
    again: dict[int, int]
    joined: list[int]

    def result(self, at: int, results: Sequence[torch.Tensor]) -> torch.Tensor:
        """The output at a position, given those that were joined."""
        at = self.again.get(at, at)
        return self.are[at] if at in self.are else results[self.joined.index(at)]


def places_of(
    leaves: Sequence[Any], kinds: Sequence[Kind], batch: RankBatch, part: tuple[int, int], model: torch.nn.Module
) -> Places:
    """Where the outputs of the rank's `part` come from."""
    found = Places(are={}, again={}, joined=[])
    first: dict[int, int] = {}
    for at, (leaf, kind) in enumerate(zip(leaves, kinds, strict=True)):
        if not isinstance(leaf, torch.Tensor) or kind.name == "unknown":
            continue
        if id(leaf) in first:
            found.again[at] = first[id(leaf)]
            continue
        first[id(leaf)] = at
        if kind.name == "rows":
            original = batch.original_of(leaf, part)
        else:
            original = leaf if kind.name == "same" and _is_whole(leaf, model) else None
        if original is None:
            found.joined.append(at)
        else:
            found.are[at] = original
    return found


def _is_whole(leaf: torch.Tensor, model: torch.nn.Module) -> bool:
    """Whether it is there as in a run of the whole batch: with a graph of its own only where that frees nothing, as that of a weight's view."""
    if leaf.grad_fn is None:
        return True
    return storage_of(leaf) in {storage_of(each) for each in (*model.parameters(), *model.buffers())}


def one_memory(
    leaves: Sequence[Any], places: Places, results: Sequence[torch.Tensor], batch: RankBatch
) -> OneMemory | None:
    """The joined outputs, and arguments, that would be one memory with others; None where there are none."""
    found: dict[int, torch.Tensor] = {}
    outputs = [(leaves[at], result) for at, result in zip(places.joined, results, strict=True)]
    arguments = batch.tensors()
    storages = [storage_of(each) for each, _ in outputs] + [storage_of(each) for each in arguments]
    if len(set(storages)) == len(storages):
        return None
    for number, (leaf, result) in enumerate(outputs):
        for other, joined in outputs[:number]:
            if overlap(leaf, other):
                found |= {id(result): result, id(joined): joined}
        for argument in arguments:
            if overlap(leaf, argument):
                found |= {id(result): result, id(argument): argument}
    return OneMemory(found.values()) if found else None
