"""Input shapes of a model: recorded while a plan is made, and compared with the plan when it is applied.

A plan is verified for the inputs that it saw. It holds for smaller ones; a larger one triggers one warning, and the run goes on: results are the
same, memory may be more. An input whose size varied from call to call while the plan was made is compared by its number of elements, any other by
each dimension, as a longer sequence in a smaller batch may need more too.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

from tightfit.effects.ambient import modes_of_program
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

    def larger(self, shapes: Mapping[str, Sequence[int]]) -> str:
        """A message about an input that is larger than all recorded ones, or about inputs none of which is known; empty if there is none."""
        for name, shape in shapes.items():
            known = self.largest.get(name)
            if known is None:
                continue
            if math.prod(shape) > math.prod(known):
                return f"input {name} is {_shape(shape)}, larger than the {_shape(known)} that the plan was made for"
            if name not in self.varying and any(n > m for n, m in zip(shape, known, strict=False)):
                return f"input {name} is {_shape(shape)}, longer in one dimension than the {_shape(known)} that the plan was made for"
        if self.largest and shapes and not self.largest.keys() & shapes:
            return f"the inputs are {', '.join(shapes)}, and the plan was made for {', '.join(self.largest)}"
        return ""

    def to_json(self) -> dict[str, Any]:
        """The JSON form in a plan's root."""
        return {"inputs": dict(self.largest), "varying": sorted(self.varying)}

    @classmethod
    def of_root(cls, root: Mapping[str, Any]) -> "Inputs":
        """The inverse of `to_json`."""
        return cls(largest={n: list(s) for n, s in root["inputs"].items()}, varying=set(root.get("varying", ())))


class InputCheck(OnlyHere):
    """The wrapper around the forward of a model with a plan. It keeps the session alive as long as it is on the model."""

    def __init__(self, session: Session, planned: Inputs | None, tell: Tell) -> None:
        self.session = session
        self._planned = planned
        self._tell = tell

    def __call__(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        # Under torch.compile a look at shapes would become guards of the compiled code, one recompilation for
        # each size. A mode of the program's would be shown each look.
        if (
            self._planned is not None
            and torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
            and not modes_of_program()
        ):
            self._compare(self._planned, input_shapes(args, kwargs))
        return forward(*args, **kwargs)

    def _compare(self, planned: Inputs, shapes: Shapes) -> None:
        if larger := planned.larger(shapes):
            # One warning is enough: a growing sequence length would give one for each batch.
            self._planned = None
            self._tell(f"{larger}: from here on the run may hold more than the plan says (make a plan for this batch)")


def input_shapes(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Shapes:
    """The shapes of the tensors among the arguments of a call, by position or name, and by their place in lists and dicts."""
    found: Shapes = {}
    for name, value in [*enumerate(args), *kwargs.items()]:
        leaves, _ = tree_flatten_with_path(value)
        found |= {f"{name}{keystr(path)}": list(leaf.shape) for path, leaf in leaves if isinstance(leaf, torch.Tensor)}
    return found


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "a scalar"
