"""The state in which tiles ran first, which their second runs in the backward pass are to see again.

A backward pass goes by what was there in the forward pass, whatever the program has changed since: a configuration that a model completes behind its
layers, a flag that is set for the next step. So that state is put back for as long as tiles run again, and what is there now afterwards.

A tensor with a graph is not kept for it, since its graph would be. Where one is gone, because the program has put another one in its place, tiles that
do not read it are as before, and what reads it is refused.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tightfit.effects.code import Code
from tightfit.effects.state import (
    RegionState,
    Snapshot,
    differences,
    restore,
    structural_differences,
    with_replaced,
)
from tightfit.techniques.wrappers.first_order import Refuse


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
        # Contents that have not changed are those of an earlier look: what was gone before the forward is not missed.
        self._gone_before = frozenset(id(value) for _, value in then.gone())

    def lost(self) -> str:
        """What was changed since and cannot be put back; empty if there is nothing."""
        if self._code is not None and not self._code.is_same():
            return "its code was replaced"
        if any(parameter._backward_hooks for parameter in self._owner().parameters()):
            return "a hook was registered on a gradient"
        if self._state.is_still(self._then):
            return ""
        found = differences(self._then, self._now())
        written = [d for d in found if d.tensor is not None and id(d.tensor) not in self._trained]
        return str(written[0]) if written else ""

    @contextmanager
    def put_back(self, refuse: Refuse) -> Iterator[None]:
        """The state of then, within the context; `refuse` makes the error to raise where a tensor is read that is gone."""
        gone = {id(v): _stand_in(path, refuse) for path, v in self._then.gone() if id(v) not in self._gone_before}
        now = self._then if not gone and self._state.is_still(self._then) else self._now()
        is_other = bool(gone) or (now is not self._then and bool(structural_differences(self._then, now)))
        # Tensors that only the state refers to that is replaced meanwhile.
        kept = now.in_graphs() if is_other else []
        if is_other:
            restore(with_replaced(self._then, gone) if gone else self._then)
        try:
            yield
        finally:
            # What the forward has set, and the program has set otherwise since, was set once more.
            if is_other or not self._state.is_still(now):
                restore(now)
            kept.clear()

    def _now(self) -> Snapshot:
        return self._state.snapshot(self._owner(), is_kept=True)


class _Gone(torch.Tensor):
    """Is in the place of a tensor that is gone: every use of it raises."""

    path: str
    refuse: Refuse

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        used = next(each for each in tree_leaves((args, kwargs or {})) if isinstance(each, cls))
        raise used.refuse(
            f"reads {used.path}, which was replaced between forward and backward, and the backward pass runs the "
            "tiles again"
        )


def _stand_in(path: str, refuse: Refuse) -> torch.Tensor:
    made = torch.empty(0, device="cpu").as_subclass(_Gone)
    made.path, made.refuse = path, refuse
    return made
