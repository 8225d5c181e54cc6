"""Half precision, whose sums over parts of a batch are rounded otherwise than those over all of it: what ranks train is bit for bit what two halves on one card give, written by hand."""

import os
from typing import Any

import torch
from tests.cpu.ranks.programs import data, mlp, program, trained
from torch import nn
from torch.autograd import grad
from torch.nn import functional


class Halves(torch.autograd.Function):
    """The rows of two halves, whose backward passes are one after the other."""

    @staticmethod
    def forward(ctx: Any, halves: Any, *weights: torch.Tensor) -> torch.Tensor:
        ctx.halves, ctx.weights = halves, weights
        return torch.cat([each.detach() for each in halves])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        of_halves = gradients[0].split([len(each) for each in ctx.halves])
        one, other = (
            grad(half, ctx.weights, gradient, retain_graph=True)
            for half, gradient in zip(ctx.halves, of_halves, strict=True)
        )
        return None, *(a + b for a, b in zip(one, other, strict=True))


def outputs(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Of a model that the ranks divide; in the plain run of halves."""
    if "TEST_RANK" in os.environ:
        return model(x)
    first = (len(x) + 1) // 2
    return Halves.apply([model(x[:first]), model(x[first:])], *model.parameters())


@program(bound=0.0)
def halves_under_autocast() -> Any:
    """Two calls within one context, with autocast's copies of the weights of both."""
    model = mlp(nn.LayerNorm(16))

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            other = outputs(model, x.flip(1))
            return functional.cross_entropy(outputs(model, x), y) + 0.1 * other.pow(2).mean()

    return trained(model, data(6, 7), torch.optim.AdamW(model.parameters(), lr=1e-2), loss_of)


@program(bound=0.0)
def halves_in_half_precision() -> Any:
    model = mlp().to(torch.bfloat16)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(outputs(model, x.bfloat16()).float(), y)

    return trained(model, data(6, 7), None, loss_of)
