"""What the autograd graphs of tensors retain: the storages that their nodes have saved, without running a hook or unpacking anything."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from tightfit.runtime.leaks.object_edges import edges_of, is_of
from tightfit.torch_hooks.saved_variables import saved_reader, saved_variables_of

StorageId = Callable[[torch.Tensor], int | None]

_MAX_NODES = 200_000
_MAX_OF_A_CONTEXT = 2_000


class GraphWalk:
    """Walks graphs; a node is looked at once, for the first tensor that leads to it."""

    def __init__(self, storage_id: StorageId) -> None:
        self._storage_id = storage_id
        self._seen: set[Any] = set()

    def saved(self, tensor: torch.Tensor) -> Iterator[tuple[int, str]]:
        """The storages that the graph of `tensor` retains, as far as they are not another tensor's already, with the name of the node."""
        for node in self.nodes(tensor):
            for held in (*_saved_by(node), *_in_context(node)):
                storage = self._storage_id(held)
                if storage is not None:
                    yield storage, node.name()

    def nodes(self, tensor: torch.Tensor) -> Iterator[Any]:
        """The nodes that were not seen yet."""
        waiting = [tensor.grad_fn]
        while waiting and len(self._seen) < _MAX_NODES:
            node = waiting.pop()
            if node is not None and node not in self._seen:
                self._seen.add(node)
                yield node
                waiting.extend(following for following, _ in node.next_functions)


def _saved_by(node: Any) -> Iterator[torch.Tensor]:
    data_of = saved_reader().data_of
    for name in saved_variables_of(node):
        try:
            saved = getattr(node, name)
        except RuntimeError:  # freed by a backward pass
            continue
        for each in saved if isinstance(saved, tuple) else (saved,):
            data = None if each is None else data_of(each)
            if isinstance(data, torch.Tensor):
                yield data


def is_context(node: Any) -> bool:
    """Whether a node is the context (`ctx`) of a `torch.autograd.Function`, which is a Python object with attributes."""
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def _in_context(node: Any) -> Iterable[torch.Tensor]:
    return [held for held, _ in tensors_of_context(node)] if is_context(node) else ()


def tensors_of_context(node: Any) -> Iterator[tuple[torch.Tensor, str]]:
    """The tensors that attributes of a context lead to, with their paths: `ctx.y`, `ctx.function.__self__.solution`."""
    waiting: list[tuple[Any, str]] = [(value, f"ctx.{name}") for name, value in vars(node).items()]
    seen = {id(value) for value, _ in waiting}
    for value, path in waiting:
        if is_of(value, torch.Tensor):
            yield value, path
        for label, each in edges_of(value) if len(waiting) < _MAX_OF_A_CONTEXT else ():
            if id(each) not in seen:
                seen.add(id(each))
                waiting.append((each, path + label))
