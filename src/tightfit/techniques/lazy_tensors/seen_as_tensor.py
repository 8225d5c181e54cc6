"""The class that stand-ins for tensors show to code that asks for it: torch's own, whose place they take.

`isinstance` says so already. By this, comparisons of classes, tables by class, a class's name and `__class__` do as well. What nothing can answer
is `type(x) is torch.Tensor`: `tightfit.effects.bytecode.class_questions` looks for that in the code of the program. Torch itself, whose compiler has other
ways for subclasses, is told what they are.
"""

import sys
import types
from pathlib import Path
from typing import Any

import torch

from tightfit.torch_hooks.manifest import SKIP_CODE

_TENSORS: Any = type(torch.Tensor)
_TORCH = str(Path(torch.__file__).parent)


class SeenAsTensor(_TENSORS):
    """The metaclass of stand-ins: their classes equal `torch.Tensor`, and their instances have it as their `__class__`."""

    def __new__(cls, name: str, bases: tuple[type, ...], own: dict[str, Any]) -> Any:
        """The class, under the name of the one that it stands in for."""
        made = super().__new__(cls, name, bases, {**own, "__class__": property(_seen_class)})
        made.__module__, made.__qualname__, made.__name__ = "torch", "Tensor", "Tensor"
        return made

    def __eq__(self, other: object) -> bool:
        return self is other or (other is torch.Tensor and not _is_of_torch(sys._getframe().f_back))

    def __hash__(self) -> int:
        # As of all that is equal.
        return hash(torch.Tensor)


def _seen_class(stand_in: object) -> type:
    return type(stand_in) if _is_of_torch(sys._getframe().f_back) else torch.Tensor


def leave_to_python() -> None:
    """Keeps the compiler from what is asked here in code that it has left to Python: it would say that it cannot go through it."""
    for function in (SeenAsTensor.__eq__, _seen_class, _is_of_torch):
        SKIP_CODE.value()(function.__code__)


def _is_of_torch(caller: types.FrameType | None) -> bool:
    # Backward passes of a card run in threads of the engine: what it calls has no frame below it.
    return caller is None or caller.f_code.co_filename.startswith(_TORCH)
