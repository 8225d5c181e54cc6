"""The tensors that a model was called with: a backward pass that runs again may read them, and the program may write to them in between.

They are held as long as the graph of their call is: of a pass that torch runs by itself, or a validation that builds graphs, batches would collect to the
end of the run. After that, as a loss may still lead to what was computed beside the result, they are known to the end of the step without being held: who
writes to one has it.
"""

import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

_NOTE = "tightfit: a call of the model"
# Up to how many are not looked through for those that are gone.
_FEW = 64


class _Call:
    """Lies among the notes of the nodes that a call has made, so that it is gone when they are."""

    __slots__ = ("__weakref__",)


class GivenTensors:
    """The tensors of the calls of a step."""

    def __init__(self) -> None:
        # Of calls whose graphs there are, in whose results a node was found, by `id` of the reference; and the references of those that are gone. Nothing looks at
        # all that there are at each call: many may come before one backward pass.
        self._held: dict[int, tuple[weakref.ref[_Call], list[torch.Tensor]]] = {}
        self._gone: deque[weakref.ref[_Call]] = deque()
        self._known: list[weakref.ref[torch.Tensor]] = []
        self._most_known = _FEW

    def add(self, given: Any, result: Any) -> None:
        """Remembers the tensors in `given`, the arguments of a call with this result."""
        self._let_go()
        call = _Call()
        # `metadata` is the anomaly mode's dict (torch/csrc/autograd/python_anomaly_mode.h).
        nodes: list[Any] = [tensor.grad_fn for tensor in _results(result) if tensor.grad_fn is not None]
        for node in nodes:
            # A node that the program keeps is of its latest call.
            node.metadata[_NOTE] = call
        # Without nodes the call is gone with this function.
        # In C, as no Python code may run where something is collected.
        note_gone = self._gone.append
        reference = weakref.ref(call, note_gone)
        self._held[id(reference)] = reference, list(_tensors(given))

    def end_step(self) -> None:
        """The optimizer steps: what was called before is over, but for graphs that there are."""
        self._let_go()
        self._known.clear()

    def take(self) -> list[torch.Tensor]:
        """All that there are, which are forgotten."""
        self._let_go()
        held, self._held = self._held, {}
        known, self._known = self._known, []
        alive = (reference() for reference in known)
        return [*(tensor for _, tensors in held.values() for tensor in tensors), *(t for t in alive if t is not None)]

    def _let_go(self) -> None:
        while self._gone:
            # One that was taken is in neither.
            _, tensors = self._held.pop(id(self._gone.popleft()), (None, ()))
            self._known += map(weakref.ref, tensors)
        if len(self._known) > self._most_known:
            self._known = [each for each in self._known if each() is not None]
            self._most_known = 2 * max(_FEW, len(self._known))


def _tensors(values: Any) -> Iterable[torch.Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))


def _results(values: Any) -> Iterable[torch.Tensor]:
    """The tensors of a result, which may be an object of the program's that holds them."""
    for leaf in tree_leaves(values):
        yield from _tensors(leaf if isinstance(leaf, torch.Tensor) else list(getattr(leaf, "__dict__", {}).values()))
