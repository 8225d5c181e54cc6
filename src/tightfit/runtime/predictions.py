"""Models that a program only predicts with: it calls them without gradients, and trains nothing.

Choices that are for such a model say so in their settings (`without_gradients`); they are applied at its first call.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from tightfit.planner.plan import Choice
from tightfit.runtime.apply import num_parameters, root_of
from tightfit.runtime.input_shapes import Inputs, input_shapes


class Predictions:
    """What `choices` say of models that are called without gradients, and the inputs of such calls."""

    def __init__(self, choices: Iterable[Choice]) -> None:
        self._planned = {root_of(c.where) for c in choices if c.settings.get("without_gradients", False)}
        self.inputs: dict[tuple[str, int], Inputs] = {}
        """By the class of a model and the number of its parameters."""

    def are_planned(self, module: torch.nn.Module) -> bool:
        """Whether there are choices for such calls of `module`."""
        return type(module).__name__ in self._planned

    def note(self, module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Notes a call without gradients; of modules without parameters none, as these are no models."""
        count = num_parameters(module)
        if count:
            self.inputs.setdefault((type(module).__name__, count), Inputs()).note(input_shapes(args, kwargs))
