"""The state in which tiles ran first, which their second runs in the backward pass are to see again.

A backward pass goes by what was there in the forward pass, whatever the program has changed since: a configuration that a model completes behind its
layers, a flag that is set for the next step. So that state is put back for as long as tiles run again, and what is there now afterwards.
"""

import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import torch

from tightfit.effects.code import Code
from tightfit.effects.state import RegionState, Snapshot, differences, restore, structural_differences


class FirstState:
    """The state `then` of the module that `owner` gives, taken in its forward. `trained` are the weights whose versions torch compares itself."""

    def __init__(
        self,
        owner: Callable[[], torch.nn.Module],
        state: RegionState,
        then: Snapshot,
        *,
        code: Code | None = None,
        trained: Collection[torch.Tensor] = (),
    ) -> None:
        self._owner = owner
        self._state = state
        self._then = then
        self._code = code
        self._trained = frozenset(map(id, trained))
        # Not those that were gone before: contents that have not changed are those of an earlier look.
        self._in_graphs = [weakref.ref(tensor) for tensor in then.in_graphs()]

    def lost(self) -> str:
        """What was changed since and cannot be put back; empty if there is nothing."""
        if self._code is not None and not self._code.is_same():
            return "the code of the module was replaced"
        if any(parameter._backward_hooks for parameter in self._owner().parameters()):
            return "a hook was put on a gradient"
        if any(reference() is None for reference in self._in_graphs):
            return f"{self._then.gone()} was changed"
        if self._state.is_still(self._then):
            return ""
        found = differences(self._then, self._now())
        written = [d for d in found if d.tensor is not None and id(d.tensor) not in self._trained]
        return str(written[0]) if written else ""

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """The state of then, within the context."""
        if self._state.is_still(self._then):
            yield
            return
        now = self._now()
        is_other = bool(structural_differences(self._then, now))
        # Tensors that only the state refers to that is replaced meanwhile.
        kept = now.in_graphs() if is_other else []
        if is_other:
            restore(self._then)
        try:
            yield
        finally:
            if is_other:
                restore(now)
            kept.clear()

    def _now(self) -> Snapshot:
        return self._state.snapshot(self._owner(), is_kept=True)
