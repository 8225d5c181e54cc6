"""What a selective checkpoint keeps of a block goes through the engine of offload between the two runs, instead of staying on the card."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tightfit.engine.saved.saved_tensors import Held, SavedTensors
from tightfit.techniques.recomputation.apply_selective_checkpointing import is_written, keeping_contexts
from tightfit.torch_hooks.manifest import KEPT_RESULT


def held_contexts(
    engine: SavedTensors, keep: frozenset[int]
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts of a forward and its second run, as those of selective checkpointing; the products whose number is in `keep` are at the engine."""
    first, later = keeping_contexts(keep)
    if torch.compiler.is_compiling():
        return first, later
    return _First(first, engine), _Later(later, first)


class _First:
    """The context of the first run, `mode`, whose results are handed over at its end."""

    def __init__(self, mode: Any, engine: SavedTensors) -> None:
        self._mode = mode
        self._engine = engine

    def __enter__(self) -> None:
        self._mode.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        found = self._mode.__exit__(*error)
        if error[0] is None:
            for kept in _kept(self._mode):
                # One that was written to is made again.
                if isinstance(kept.val, torch.Tensor) and not is_written(kept):
                    kept.val = self._engine.hold(kept.val) or kept.val
        return found


class _Later:
    """The context of each later run, before which the results are back on the card; `first` has them."""

    def __init__(self, later: AbstractContextManager[Any], first: Any) -> None:
        self._later = later
        self._first = first

    def __enter__(self) -> None:
        for kept in _kept(self._first):
            if isinstance(kept.val, Held):
                if kept.val.is_written_to:
                    # A version that no tensor has: it is made again.
                    kept.val, kept.version = torch.empty(0, device="cpu"), -1
                else:
                    kept.val = kept.val.take()
                    kept.version = kept.val._version
        self._later.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._later.__exit__(*error)


def _kept(mode: Any) -> Iterator[Any]:
    """What `mode` has kept of the results of operators: torch's own objects, with a value and its version."""
    kind = KEPT_RESULT.value()
    for results in mode.storage.values():
        # By their number in torch 2.13 and later, before it in the order of the calls.
        yield from (leaf for leaf in tree_leaves(results) if isinstance(leaf, kind))
