"""Finds which tensors only reference cycles keep: Python's garbage collector is run once, and what it finds is looked at before it is dropped.

The collector clears weak references and runs finalisers as it does in any collection.
"""

import collections
import gc
import itertools
import types
from collections.abc import Iterator
from typing import Any

import torch

from tightfit.runtime.leaks.kept_graphs import GraphWalk, is_context
from tightfit.runtime.leaks.object_edges import edges_of, is_atom, is_of

_MAX_OF_A_PATH = 8


class Garbage:
    """The objects that no name led to, by identity, until `drop`."""

    def __init__(self) -> None:
        already, flags = len(gc.garbage), gc.get_debug()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            gc.collect()
        finally:
            gc.set_debug(flags)
        self._objects: list[Any] = gc.garbage[already:]
        del gc.garbage[already:]
        self._ids = {id(value) for value in self._objects}

    def tensors(self) -> list[torch.Tensor]:
        """Tensors among them."""
        return [value for value in self._objects if is_of(value, torch.Tensor)]

    def path_to(self, tensor: torch.Tensor) -> tuple[str, str]:
        """The path to a tensor from an object of a cycle, and that cycle as text; both empty where the tensor is not among the garbage."""
        if id(tensor) not in self._ids:
            return "", ""
        referrers: dict[int, list[tuple[int, str]]] = collections.defaultdict(list)
        by_id = {id(value): value for value in self._objects}
        for value in self._objects:
            for label, each in itertools.chain(edges_of(value), _of_graph(value)):
                if id(each) in by_id:
                    referrers[id(each)].append((id(value), label))
        # Outwards from the tensor, to the nearest object that leads back to itself.
        parents: dict[int, tuple[int, str]] = {}
        waiting = collections.deque([id(tensor)])
        while waiting:
            at = waiting.popleft()
            cycle = _cycle_through(at, referrers)
            if cycle:
                path, inner = "", at
                while inner != id(tensor):
                    inner, label = parents[inner]
                    path += label
                kind = _name_of(by_id[at])
                # A tensor of a cycle is named by the cycle.
                path = path or "".join(cycle)
                return f"{kind}{path}", f"cycle: {kind}{''.join(cycle)} is that {kind} again"
            for source, label in referrers[at]:
                if source not in parents and source != id(tensor):
                    parents[source] = at, label
                    waiting.append(source)
        return type(tensor).__name__, ""

    def drop(self) -> None:
        """Drops the objects, as the collector would have."""
        self._objects.clear()
        self._ids.clear()


def _of_graph(value: Any) -> Iterator[tuple[str, Any]]:
    """The contexts of autograd.Functions in the graph of a tensor, which are Python objects too."""
    if is_of(value, torch.Tensor) and value.grad_fn is not None:
        yield from ((".grad_fn", node) for node in GraphWalk(lambda _: None).nodes(value) if is_context(node))


def _cycle_through(start: int, referrers: dict[int, list[tuple[int, str]]]) -> list[str]:
    """The labels of the shortest way from an object back to itself; empty where there is none."""
    parents: dict[int, tuple[int, str]] = {}
    waiting = collections.deque([start])
    while waiting:
        at = waiting.popleft()
        for source, label in referrers[at]:
            if source == start:
                labels = [label]
                while at != start:
                    at, outer = parents[at]
                    labels.append(outer)
                return list(itertools.islice(filter(None, labels), _MAX_OF_A_PATH))
            if source not in parents:
                parents[source] = at, label
                waiting.append(source)
    return []


def _name_of(value: Any) -> str:
    if is_of(value, (type, types.FunctionType)):
        return str(value.__qualname__)
    return "" if is_atom(value) else type(value).__name__
