"""The writes to storages by operators of the program, besides those of optimizers, with the lines that made them."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tightfit.capture.dispatch.virtual import VirtualGpu
from tightfit.tape import Phase


class StorageWrites:
    """Of each storage, the operators that wrote to it and their lines."""

    def __init__(self, gpu: VirtualGpu) -> None:
        self._recorder = gpu.recorder
        self._index_of = gpu.storages.index_of
        self._writes: dict[int, list[tuple[int, int]]] = {}
        gpu.operators.on_write = self._wrote

    def _wrote(self, tensors: Iterable[torch.Tensor]) -> None:
        """The last operator has written to these tensors."""
        # Optimizers write to parameters in every step; that is their business.
        if self._recorder.phase in (Phase.FORWARD, Phase.OTHER):
            place = self._recorder.num_operators - 1, int(self._recorder.operators["line"][-1])
            for tensor in tensors:
                storage = self._index_of(tensor)
                if storage is not None:
                    self._writes.setdefault(storage, []).append(place)

    def storages(self, values: Any) -> frozenset[int]:
        """The storages of all tensors in nested containers."""
        found = (self._index_of(value) for value in tree_leaves(values) if isinstance(value, torch.Tensor))
        return frozenset(storage for storage in found if storage is not None)

    def line(self, storages: Iterable[int], begin: int, end: int) -> str | None:
        """The line of the first operator in `range(begin, end)` that writes to one of these; None if there is none."""
        places = (place for storage in storages for place in self._writes.get(storage, ()))
        lines = [line for operator, line in places if begin <= operator < end]
        return self._recorder.strings.texts[lines[0]] if lines else None

    def forget_before(self, begin: int) -> None:
        """Drops the writes of operators before `begin`."""
        self._writes = {s: kept for s, places in self._writes.items() if (kept := [p for p in places if p[0] >= begin])}
