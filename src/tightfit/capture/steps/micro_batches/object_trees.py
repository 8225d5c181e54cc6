"""Takes results apart into leaves, and makes results like them: containers that torch's pytree knows, and plain objects, such as a cache of keys and values."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

PLAIN = (bool, str, int, float, type(None), type, torch.dtype, torch.device, torch.layout)
"""Leaves that are given again as they are."""
_MAX_DEPTH = 6


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """A result without its leaves. `objects` are what is no leaf to be counted, by place: the attributes of an object of the class `kind`."""

    structure: TreeSpec
    objects: tuple["Tree | None", ...]
    kind: type | None = None

    def made(self, leaves: Iterator[Any]) -> Any:
        """A result with these leaves."""
        parts = [next(leaves) if tree is None else tree.made(leaves) for tree in self.objects]
        value = tree_unflatten(parts, self.structure)
        if self.kind is None:
            return value
        made = object.__new__(self.kind)
        made.__dict__.update(value)
        return made


def taken_apart(value: Any) -> tuple[list[Any], Tree] | None:
    """The leaves of a result, tensors and `PLAIN` ones, and their tree; None if there is something else in it."""
    leaves = list[Any]()
    tree = _taken(value, None, leaves, 0)
    return None if tree is None else (leaves, tree)


def _taken(value: Any, kind: type | None, leaves: list[Any], depth: int) -> Tree | None:
    parts, structure = tree_flatten(value)
    objects = list[Tree | None]()
    for part in parts:
        if isinstance(part, (torch.Tensor, *PLAIN)):
            leaves.append(part)
            objects.append(None)
            continue
        tree = (
            _taken(dict(vars(part)), type(part), leaves, depth + 1) if depth < _MAX_DEPTH and _is_data(part) else None
        )
        if tree is None:
            return None
        objects.append(tree)
    return Tree(structure=structure, objects=tuple(objects), kind=kind)


def _is_data(value: Any) -> bool:
    """Whether an object is its attributes: neither a module, nor anything that Python or C makes in its own way."""
    kind = type(value)
    return (
        not isinstance(value, torch.nn.Module)
        and not callable(value)
        and kind.__new__ is object.__new__
        and kind.__setattr__ is object.__setattr__
        and all(set(vars(base).get("__slots__", ())) <= {"__dict__", "__weakref__"} for base in kind.__mro__[:-1])
        and hasattr(value, "__dict__")
    )
