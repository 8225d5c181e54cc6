"""States of other ranks' parameters that the program still has: in a `state_dict()`, or in one that it has loaded.

On one card these tensors are the optimizer's own, which each update changes: a checkpoint that is taken at the best step and saved at the end has the states of the end.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tightfit.ranks.rank_group import RankGroup
from tightfit.torch_hooks.weak_references import WeakTable

StatesOf = Callable[[int, Sequence[torch.Tensor]], list[dict[str, Any]]]


class KeptStates:
    """The tensors of one optimizer's states that were handed out on this rank; they are held weakly."""

    def __init__(self, group: RankGroup, tell: Callable[[str], None]) -> None:
        self._group, self._tell = group, tell
        self._tensors: WeakTable[torch.Tensor, tuple[weakref.ref[torch.Tensor], str]] = WeakTable()
        # The same on all ranks, which ask each other as long as it is so.
        self._are_any = self._was_told = False

    def note(self, states: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
        """States by their parameters that the optimizer drops on this rank; the program may have them."""
        self._are_any = True
        for parameter, state in states.items():
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    self._tensors[value] = weakref.ref(parameter), name

    def renew(self, owners: Sequence[tuple[torch.Tensor, int]], states_of: StatesOf) -> None:
        """After an update, on all ranks: what the program has gets what `states_of(rank, parameters)` has now."""
        if not self._are_any:
            return
        kept: dict[int, list[tuple[str, torch.Tensor]]] = {}
        for tensor, (reference, name) in self._tensors.items():
            kept.setdefault(id(reference()), []).append((name, tensor))
        mine = torch.tensor([id(parameter) in kept for parameter, _ in owners])
        are_asked = torch.stack(self._group.links.of_each(mine)).any(0).tolist()
        self._are_any = any(are_asked)
        if self._are_any and not self._was_told:
            self._was_told = True
            self._tell(
                "the program keeps a state_dict of its optimizer: its sharded states are sent to all ranks after each update, until it is dropped (del)"
            )
        for rank in range(self._group.size):
            theirs = [p for (p, owner), is_asked in zip(owners, are_asked, strict=True) if is_asked and owner == rank]
            for parameter, state in zip(theirs, states_of(rank, theirs) if theirs else [], strict=True):
                for name, tensor in kept.get(id(parameter), ()):
                    if isinstance(now := state.get(name), torch.Tensor):
                        tensor.copy_(now)
