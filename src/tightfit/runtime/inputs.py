"""What a model is given: noted while a plan is made, and compared with the plan when it is carried out.

A plan is verified for the inputs that it saw. The first forward with gradients refuses larger ones, unless that input changed its size from call
to call already while the plan was made; a larger one that comes later is told once, and the run goes on.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

from tightfit.errors import ApplyError
from tightfit.techniques.session import Session
from tightfit.techniques.wrappers.forwards import OnlyHere

Shapes = dict[str, list[int]]
Tell = Callable[[str], None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The largest inputs of a model by name, and the names of those whose size changed from call to call."""

    largest: Shapes = dataclasses.field(default_factory=dict)
    varying: set[str] = dataclasses.field(default_factory=set)

    def note(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Adds the inputs of a call."""
        for name, shape in shapes.items():
            known = self.largest.setdefault(name, list(shape))
            if list(shape) != known:
                self.varying.add(name)
                self.largest[name] = max(known, list(shape), key=math.prod)

    def larger(self, shapes: Mapping[str, Sequence[int]], *, but_varying: bool) -> str:
        """Which of the inputs is larger than all that were noted, in words; empty if none is."""
        for name, shape in shapes.items():
            known = self.largest.get(name)
            if known is None or (but_varying and name in self.varying):
                continue
            if math.prod(shape) > math.prod(known):
                return f"input {name} is {_shape(shape)}, larger than the {_shape(known)} that the plan was made for"
        return ""

    def to_json(self) -> dict[str, Any]:
        """As a root of a plan has it."""
        return {"inputs": dict(self.largest), "varying": sorted(self.varying)}

    @classmethod
    def of_root(cls, root: Mapping[str, Any]) -> "Inputs":
        """What `to_json` wrote."""
        return cls(largest={n: list(s) for n, s in root["inputs"].items()}, varying=set(root.get("varying", ())))


class InputCheck(OnlyHere):
    """The code around the forward of a model that a plan is on. It keeps the session for as long as the model lives with it."""

    def __init__(self, session: Session, planned: Inputs | None, tell: Tell) -> None:
        self.session = session
        self._planned = planned
        self._tell = tell
        self._is_first = True

    def __call__(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if self._planned is not None and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._compare(self._planned, input_shapes(args, kwargs))
        return forward(*args, **kwargs)

    def _compare(self, planned: Inputs, shapes: Shapes) -> None:
        if self._is_first and (larger := planned.larger(shapes, but_varying=True)):
            raise ApplyError(f"{larger}; make a plan for this batch")
        self._is_first = False
        if larger := planned.larger(shapes, but_varying=False):
            self._planned = None
            self._tell(f"{larger}: from here on the run may hold more than the plan says")


def input_shapes(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Shapes:
    """The shapes of the tensors among the arguments of a call, by position or name, and by their place in lists and dicts."""
    found: Shapes = {}
    for name, value in [*enumerate(args), *kwargs.items()]:
        leaves, _ = tree_flatten_with_path(value)
        found |= {f"{name}{keystr(path)}": list(leaf.shape) for path, leaf in leaves if isinstance(leaf, torch.Tensor)}
    return found


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "a scalar"
