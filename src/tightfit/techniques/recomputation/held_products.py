"""What a selective checkpoint keeps of a block goes through the engine of offload between the two runs, instead of staying on the card."""

from contextlib import AbstractContextManager
from typing import Any

import torch

from tightfit.engine.saved.saved_tensors import Held, SavedTensors
from tightfit.techniques.recomputation.apply_selective_checkpointing import keeping_contexts
from tightfit.techniques.recomputation.kept_results import GivesResults, KeepsResults


def held_contexts(
    engine: SavedTensors, keep: frozenset[int]
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts of a forward and its second run, as those of selective checkpointing; the products whose number is in `keep` are at the engine."""
    if torch.compiler.is_compiling():
        return keeping_contexts(keep)
    first = KeepsResults(keep)
    return _First(first, engine), _Later(first)


class _First:
    """The context of the first run, `mode`, whose results are handed over at its end."""

    def __init__(self, mode: KeepsResults, engine: SavedTensors) -> None:
        self._mode = mode
        self._engine = engine

    def __enter__(self) -> None:
        self._mode.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        found = self._mode.__exit__(*error)
        if error[0] is None:
            # Those that were written to are made again, and not kept.
            for kept in self._mode.kept.values():
                for each in kept.tensors():
                    each.value = self._engine.hold(each.value) or each.value
        return found


class _Later:
    """The context of each later run, before which the results of the `first` are back on the card."""

    def __init__(self, first: KeepsResults) -> None:
        self._first = first
        self._mode = GivesResults(first)

    def __enter__(self) -> None:
        for number, kept in list(self._first.kept.items()):
            for each in kept.tensors():
                if not isinstance(each.value, Held):
                    continue
                if each.value.is_written_to:
                    self._first.kept.pop(number, None)
                else:
                    each.keep(each.value.take())
        self._mode.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._mode.__exit__(*error)
