"""Weights with a parametrisation that are computed once for several reads (`parametrize.cached`), and what runs again, or in parts, finds of them."""

import contextlib

import torch
from tests.attacks.models import Block, Net, sgd, tokens
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrize


class _Bent(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * (1 + 0.1 * torch.tanh(weight))


class _Noisy(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + 0.05 * torch.randn_like(weight)


class _Twice(Block):
    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(functional.gelu(self.wide(self.norm(x)))) + 0.1 * self.narrow(functional.gelu(self.wide(x)))


@attack(
    "changes", "weights are cached over two forwards and their backward pass, in every second step (parametrize.cached)"
)
def cached_over_two_forwards(t: Trial) -> None:
    model = Net()
    for block in model.blocks:
        parametrize.register_parametrization(block.wide, "weight", _Bent())
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(5):
        x, y = tokens(step)
        with parametrize.cached() if step % 2 else contextlib.nullcontext():
            loss = model(x, y) + 0.5 * model(x * 0.5, y)
            optimizer.zero_grad()
            loss.backward()
        t.note("loss", loss)
        optimizer.step()
        t.end_step()


@attack("changes", "weights are cached over a whole step, and an evaluation after the update reads those of before it")
def cached_past_the_update(t: Trial) -> None:
    model = Net()
    for block in model.blocks:
        parametrize.register_parametrization(block.wide, "weight", _Bent())
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        x, y = tokens(step)
        with parametrize.cached():
            loss = model(x, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                t.note("evaluated", model(x, y))
        t.note("loss", loss)
        t.end_step()


@attack("changes", "noise in weights is drawn at each read, and from step 4 on once for a forward (parametrize.cached)")
def cached_noise_begins_late(t: Trial) -> None:
    model = Net([_Twice(), _Twice()])
    for block in model.blocks:
        parametrize.register_parametrization(block.wide, "weight", _Noisy())
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(6):
        with parametrize.cached() if step >= 3 else contextlib.nullcontext():
            loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        t.note("loss", loss)
        optimizer.step()
        t.end_step()
