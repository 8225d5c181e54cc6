"""The class that stand-ins for tensors show to code that asks for it: torch's own, whose place they take.

`isinstance` says so already. By this, comparisons of classes, tables by class, a class's name and `__class__` do as well. What nothing can answer
is `type(x) is torch.Tensor`: `tightfit.effects.class_questions` looks for that in the code of the program.
"""

from typing import Any

import torch

_TENSORS: Any = type(torch.Tensor)


class SeenAsTensor(_TENSORS):
    """The metaclass of stand-ins: their classes equal `torch.Tensor`, and their instances have it as their `__class__`."""

    def __new__(cls, name: str, bases: tuple[type, ...], own: dict[str, Any]) -> Any:
        """The class, under the name of the one that it stands in for."""
        made = super().__new__(cls, name, bases, {**own, "__class__": property(_seen_class)})
        made.__module__, made.__qualname__, made.__name__ = "torch", "Tensor", "Tensor"
        return made

    def __eq__(cls, other: object) -> bool:
        return other is torch.Tensor or isinstance(other, SeenAsTensor)

    def __hash__(cls) -> int:
        return hash(torch.Tensor)


def _seen_class(_: object) -> type:
    return torch.Tensor
