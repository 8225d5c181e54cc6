"""Weights that a model trains and does not have among its parameters."""

from typing import Any

import torch
from tests.cpu.ranks.programs import data, program, result_of, trained
from torch import nn
from torch.nn import functional


class _Listed(nn.Module):
    """Some of its layers are in a plain list, and a weight in no module at all."""

    def __init__(self, scale: torch.Tensor) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.listed = [nn.Linear(8, 8) for _ in range(3)]
        self.scales = [scale]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        for layer in self.listed:
            hidden = layer(hidden).tanh()
        return self.last(hidden * self.scales[0])

    def every_weight(self) -> list[torch.Tensor]:
        return [*self.parameters(), *(each for layer in self.listed for each in layer.parameters()), self.scales[0]]


@program()
def weights_that_are_no_parameters() -> Any:
    """Clipped with the others; hooks on them; other layers by turns, one that is new, one that is frozen; accumulation over two, a batch of another size."""
    model = _Listed(torch.ones(8, requires_grad=True))
    every, layers, seen = model.every_weight(), model.listed, []
    model.listed[0].weight.register_hook(lambda gradient: seen.append(gradient.norm()) or gradient * 0.5)
    optimizer = torch.optim.AdamW(every, lr=1e-2)
    for step, (x, y) in enumerate([*data(8, 6), *data(2, 7)]):
        model.listed = layers[: 1 + step % 3]
        layers[1].requires_grad_(step % 4 != 1)
        if step == 5:
            layers[0] = nn.Linear(8, 8)
            optimizer.add_param_group({"params": list(layers[0].parameters())})
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        seen.append(loss.detach())
        if step % 2:
            seen.append(nn.utils.clip_grad_norm_(every, 0.3))
            optimizer.step()
            optimizer.zero_grad()
    return {**result_of(model, losses=seen), **{f"other.{n}": each.detach() for n, each in enumerate(every)}}


@program()
def weight_that_was_made_before_the_forward() -> Any:
    """Its graph is not of the forward."""
    made_of = torch.zeros(8, requires_grad=True)
    model = _Listed(made_of)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        model.scales[0] = made_of.exp()
        return functional.cross_entropy(model(x), y)

    return trained(model, data(4), loss_of=loss_of)
