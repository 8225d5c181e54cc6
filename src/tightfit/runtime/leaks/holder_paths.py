"""Walks from the names of a program to the objects that it can reach, breadth first, and keeps the shortest path of names to each tensor."""

import collections
import dataclasses
import re
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from tightfit.runtime.leaks.named_roots import Named
from tightfit.runtime.leaks.object_edges import SlotNames, edges_of, is_atom, is_of

MAX_OBJECTS = 600_000
"""A bound on the objects that are looked at: a few seconds."""
_INDEX = re.compile(r"\[(?:-?\d+|'[^']*\d[^']*')\]")


@dataclasses.dataclass(slots=True)
class _Visited:
    """An object that was reached: from which one (its place among the visited, -1 for a root), and by which label."""

    value: Any
    parent: int
    label: str


@dataclasses.dataclass(frozen=True, slots=True)
class KeptTensor:
    """A tensor that a path of names leads to. `containers` are the objects on the path, the innermost first, and `labels` what leads from each to the next."""

    tensor: torch.Tensor
    labels: tuple[str, ...]
    root: str
    containers: tuple[Any, ...]

    @property
    def path(self) -> str:
        """The names and indices, from the root on."""
        return "".join(reversed(self.labels))

    @property
    def group(self) -> str:
        """The path without its indices: the same for all elements of a container."""
        return _INDEX.sub("[*]", self.path)


class Reachable:
    """All that the given roots lead to. `drop` ends it: it refers to every object of the program meanwhile."""

    def __init__(self) -> None:
        self._visited: list[_Visited] = []
        self._places: dict[int, int] = {}
        self._roots: dict[int, str] = {}

    def add(self, roots: Iterable[Named]) -> None:
        """Walks on from these."""
        waiting: collections.deque[int] = collections.deque()
        slots = SlotNames()
        # Roots are taken in order, but all of them before what they lead to: the shortest path is the one to name.
        for name, what, value in roots:
            place = self._visit(value, -1, name)
            if place is not None:
                self._roots[place] = what
                waiting.append(place)
        while waiting and len(self._visited) < MAX_OBJECTS:
            place = waiting.popleft()
            value = self._visited[place].value
            for label, each in edges_of(value, slots):
                found = self._visit(each, place, label)
                if found is not None:
                    waiting.append(found)

    @property
    def is_cut(self) -> bool:
        """Whether there were more objects than are looked at."""
        return len(self._visited) >= MAX_OBJECTS

    def tensors(self) -> Iterator[KeptTensor]:
        """The tensors that were reached."""
        for place, visited in enumerate(self._visited):
            if is_of(visited.value, torch.Tensor):
                yield self.kept(place)

    def place_of(self, value: Any) -> int | None:
        """The place of an object, None if it was not reached."""
        return self._places.get(id(value))

    def kept(self, place: int) -> KeptTensor:
        """The object at a place with its path."""
        labels, containers, at = [], [], place
        while True:
            visited = self._visited[at]
            labels.append(visited.label)
            if at != place:
                containers.append(visited.value)
            if visited.parent < 0:
                break
            at = visited.parent
        return KeptTensor(self._visited[place].value, tuple(labels), self._roots[at], tuple(containers))

    def drop(self) -> None:
        """Drops all references."""
        self._visited.clear()
        self._places.clear()

    def _visit(self, value: Any, parent: int, label: str) -> int | None:
        if is_atom(value) or id(value) in self._places or is_of(value, (types.ModuleType, types.FrameType)):
            return None
        place = self._places[id(value)] = len(self._visited)
        self._visited.append(_Visited(value, parent, label))
        return place
