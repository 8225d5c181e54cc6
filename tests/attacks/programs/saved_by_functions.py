"""Functions of the program's that ask in their backward pass what a saved tensor is: its identity, class or attributes, and hooks on accumulators."""

from collections.abc import Callable
from typing import Any

import torch
from tests.attacks.models import Block, Net, sgd, train
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional

# Those with hooks for saved tensors.
_WITH_HOOKS = (
    "checkpointing",
    "selective checkpointing",
    "weight streaming",
    "trained weight streaming",
    "activation offload",
)


def _linear(asks: Callable[[torch.Tensor], bool]) -> type[torch.autograd.Function]:
    """A linear function with a gradient of twice its size where `asks` says no of its weight, as it is in a plain step."""

    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, weight)
            return x @ weight.t()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x, weight = ctx.saved_tensors
            size = 1.0 if asks(weight) else 2.0
            return gradient @ weight * size, size * gradient.flatten(0, -2).t() @ x.flatten(0, -2)

    return Linear


class _Asking(Block):
    def __init__(self, function: Callable[[nn.Module], type[torch.autograd.Function]]) -> None:
        super().__init__()
        self.function = [function(self)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.function[0].apply(self.norm(x), self.wide.weight)
        return x + self.narrow(functional.gelu(wide))


@attack(
    "recomputation",
    "a function's backward pass asks whether its saved weight is the module's own (by identity)",
    only=_WITH_HOOKS,
)
def saved_weight_by_identity(t: Trial) -> None:
    train(t, Net([_Asking(lambda block: _linear(lambda weight: weight is block.wide.weight)) for _ in range(2)]))


@attack(
    "recomputation",
    "a function's backward pass looks its saved weight up in a dict by its id (per-weight scales)",
    only=_WITH_HOOKS,
)
def saved_weight_by_id(t: Trial) -> None:
    scales: dict[int, float] = {}
    model = Net([_Asking(lambda _: _linear(lambda weight: id(weight) in scales)) for _ in range(2)])
    scales.update((id(p), 1.0) for p in model.parameters())
    train(t, model)


@attack("recomputation", "a function's backward pass asks whether its saved weight is a Parameter", only=_WITH_HOOKS)
def saved_weight_by_class(t: Trial) -> None:
    train(t, Net([_Asking(lambda _: _linear(lambda weight: isinstance(weight, nn.Parameter))) for _ in range(2)]))


@attack(
    "recomputation",
    "a function's backward pass reads an attribute of its saved weight (Megatron's flags)",
    only=_WITH_HOOKS,
)
def saved_weight_by_attribute(t: Trial) -> None:
    model = Net([_Asking(lambda _: _linear(lambda weight: getattr(weight, "is_expert", False))) for _ in range(2)])
    for parameter in model.parameters():
        parameter.is_expert = True
    train(t, model)


@attack(
    "recomputation",
    "a function adds the gradient of its weight to a buffer on the weight itself (main_grad)",
    only=_WITH_HOOKS,
)
def saved_weight_with_main_gradient(t: Trial) -> None:
    class Accumulating(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, weight)
            return x @ weight.t()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x, weight = ctx.saved_tensors
            made = gradient.flatten(0, -2).t() @ x.flatten(0, -2)
            if hasattr(weight, "main_grad"):
                weight.main_grad.add_(made)
            return gradient @ weight, made

    model = Net([_Asking(lambda _: Accumulating) for _ in range(2)])
    for block in model.blocks:
        block.wide.weight.main_grad = torch.zeros_like(block.wide.weight)

    def between(_: int) -> None:
        t.note("main", [block.wide.weight.main_grad for block in model.blocks])

    train(t, model, between=between)


@attack("gradients", "hooks on gradient accumulators that the program made and holds before the plan (as DDP does)")
def hooks_on_held_accumulators(t: Trial) -> None:
    model = Net()
    held = [p.expand_as(p).grad_fn.next_functions[0][0] for p in model.parameters()]
    seen: list[int] = []
    for node in held:
        node.register_hook(lambda *_: seen.append(1))
    train(t, model, sgd(model), between=lambda _: t.note("seen", len(seen)))
