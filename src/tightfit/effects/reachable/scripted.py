"""The attributes of scripted modules, which lie outside of Python: read by the names in their graphs, and put back."""

from typing import Any, final

import torch
from torch.jit import ScriptModule

from tightfit.effects.holders import same_value
from tightfit.effects.reachable.drawn import Drawn

_NONE = object()


@final
class _Attributes:
    """Values by module and name; tensors are compared by identity, what is in lists and dicts by its own value."""

    __slots__ = ("values",)

    def __init__(self, values: dict[tuple[str, str], Any]) -> None:
        self.values = values

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Attributes) and _is_same(self.values, other.values)

    __hash__ = object.__hash__


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(value, other[name]) for name, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return same_value(one, other)


def scripted_attributes(path: str, module: torch.nn.Module) -> tuple[Drawn, dict[str, torch.Tensor]] | None:
    """The plain attributes of a scripted module and of those inside it, and their tensors by path; None for other modules, and where it has none."""
    if not isinstance(module, ScriptModule):
        return None
    names = _named(module)

    def read() -> _Attributes:
        found = {}
        for inside, part in module.named_modules():
            for name in names:
                value = getattr(part, name, _NONE)
                if value is not _NONE and not isinstance(value, torch.nn.Module | torch.nn.Parameter):
                    found[inside, name] = value
        return _Attributes(found)

    def put(content: _Attributes) -> None:
        parts = dict(module.named_modules())
        for (inside, name), value in content.values.items():
            if not _is_same(getattr(parts[inside], name), value):
                setattr(parts[inside], name, value)

    now = read().values
    tensors = {f"{path}.{inside}.{n}": v for (inside, n), v in now.items() if isinstance(v, torch.Tensor)}
    return Drawn(path=path, key=id(module), state=read, put=put), tensors


def _named(module: Any) -> frozenset[str]:
    """The attributes that its graph reads or sets, in whichever module."""
    graph = module.inlined_graph
    nodes = (*graph.findAllNodes("prim::GetAttr"), *graph.findAllNodes("prim::SetAttr"))
    return frozenset(node.s("name") for node in nodes)
