"""Lazy gradients that stand on parameters when a backward pass begins, and are taken off for it: the engine would add to what is there."""

import dataclasses

import torch

from tightfit.techniques.lazy_tensors.deferred_gradients import settle_zeros


@dataclasses.dataclass(slots=True)
class Standing:
    """Zeros, and consumed ones, which nothing can be added to."""

    zeros: dict[torch.Tensor, torch.Tensor] = dataclasses.field(default_factory=dict)
    used: dict[torch.Tensor, torch.Tensor] = dataclasses.field(default_factory=dict)

    def make_zeros(self) -> None:
        """Restores zeros as ordinary gradients: hooks of the program's may look at them within the pass."""
        while self.zeros:
            parameter, gradient = self.zeros.popitem()
            parameter.grad = gradient
            settle_zeros(parameter)

    def put_back(self) -> None:
        """Restores zeros on parameters that got no gradient, and consumed gradients, which the script has to clear before it can step again."""
        for parameter, gradient in self.zeros.items():
            if parameter.grad is None:
                parameter.grad = gradient
        for parameter, gradient in self.used.items():
            parameter.grad = gradient
