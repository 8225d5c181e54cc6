"""The tensors that a model was called with: a backward pass that runs again may read them, and the program may write to them in between.

They are held as long as the graph of their call is, and no longer: of a pass that torch runs by itself, or a validation that builds graphs, batches would
collect to the end of the run.
"""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

_NOTE = "tightfit: a call of the model"


class _Call:
    """Lies among the notes of the nodes that a call has made, so that it is gone when they are."""

    __slots__ = ("__weakref__",)


class GivenTensors:
    """The tensors of the calls whose graphs there are. Those of a call in whose result no node is found are held to the end of the step."""

    def __init__(self) -> None:
        self._calls: list[tuple[weakref.ref[_Call] | None, list[torch.Tensor]]] = []

    def add(self, given: Any, result: Any) -> None:
        """Remembers the tensors in `given`, the arguments of a call with this result."""
        self._calls = [(call, tensors) for call, tensors in self._calls if call is None or call() is not None]
        # `metadata` is the anomaly mode's dict (torch/csrc/autograd/python_anomaly_mode.h).
        nodes: list[Any] = [tensor.grad_fn for tensor in _results(result) if tensor.grad_fn is not None]
        call = _Call()
        for node in nodes:
            # A node that the program keeps is of its latest call.
            node.metadata[_NOTE] = call
        if nodes or not isinstance(result, torch.Tensor):
            self._calls.append((weakref.ref(call) if nodes else None, list(_tensors(given))))

    def end_step(self) -> None:
        """The optimizer has stepped."""
        self._calls = [(call, tensors) for call, tensors in self._calls if call is not None]

    def take(self) -> list[torch.Tensor]:
        """All that there are, which are forgotten."""
        calls, self._calls = self._calls, []
        return [tensor for _, tensors in calls for tensor in tensors]


def _tensors(values: Any) -> Iterable[torch.Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))


def _results(values: Any) -> Iterable[torch.Tensor]:
    """The tensors of a result, which may be an object of the program's that holds them."""
    for leaf in tree_leaves(values):
        yield from _tensors(leaf if isinstance(leaf, torch.Tensor) else list(getattr(leaf, "__dict__", {}).values()))
