"""Blocks that have an effect only when their input is large, as batches are from the fourth step on, and blocks that ask for their place in the graph."""

from typing import Any

import torch
from tests.attacks.models import Block, Net, sgd, tokens, train
from tests.attacks.registry import attack
from tests.attacks.trial import Trial

_NUM_STEPS = 6


def _grown(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = tokens(step)
    return (x * 10 if step >= 3 else x), y


class _Seldom(Block):
    """Calls `effect` when its input is large."""

    held: Any = None

    def effect(self, x: torch.Tensor) -> torch.Tensor:
        """What it does then."""
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if float(x.detach().abs().mean()) > 2:
            x = self.effect(x)
        return x + self.inner(x)


def _train(t: Trial, block: type[_Seldom], held: Any = None) -> None:
    model = Net([block(), block()])
    optimizer = sgd(model, 0.01)
    for each in model.blocks:
        each.held = [held(model, optimizer)] if held else None
    train(t, model, optimizer, batch=_grown, num_steps=_NUM_STEPS)


class _LocalLoss(_Seldom):
    def effect(self, x: torch.Tensor) -> torch.Tensor:
        (0.1 * self.inner(x.detach()).square().mean()).backward()
        return x


@attack("recomputation", "a large input has the block run a local loss backwards inside of its forward")
def seldom_local_loss(t: Trial) -> None:
    model = Net([_LocalLoss(), _LocalLoss()])
    optimizer = sgd(model, 0.01)
    t.apply(model, optimizer)
    for step in range(_NUM_STEPS):
        optimizer.zero_grad()
        loss = model(*_grown(step))
        t.note("loss", loss)
        loss.backward()
        optimizer.step()
        t.end_step()


class _Hooks(_Seldom):
    def effect(self, x: torch.Tensor) -> torch.Tensor:
        self.wide.weight.register_hook(lambda g: g * 0.9)
        return x


@attack("recomputation", "a large input has the block put one more hook on its weight, which scales the gradient")
def seldom_hooks_weight(t: Trial) -> None:
    _train(t, _Hooks)


class _AsksLeaf(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (2.0 if x.is_leaf else 1.0) * self.inner(x)


class _Rates(_Seldom):
    def effect(self, x: torch.Tensor) -> torch.Tensor:
        self.held[0].param_groups[0]["lr"] *= 0.9
        return x


@attack("recomputation", "a large input has the block lower the optimizer's rate")
def seldom_lowers_rate(t: Trial) -> None:
    _train(t, _Rates, lambda _, optimizer: optimizer)


class _Schedules(_Seldom):
    def effect(self, x: torch.Tensor) -> torch.Tensor:
        self.held[0].step()
        return x


@attack("recomputation", "a large input has the block step a scheduler")
def seldom_steps_scheduler(t: Trial) -> None:
    _train(t, _Schedules, lambda _, optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))


class _Moments(_Seldom):
    def effect(self, x: torch.Tensor) -> torch.Tensor:
        for state in self.held[0].state.values():
            state["momentum_buffer"].mul_(0.5)
        return x


@attack("recomputation", "a large input has the block halve the optimizer's momentum")
def seldom_halves_momentum(t: Trial) -> None:
    _train(t, _Moments, lambda _, optimizer: optimizer)


@attack("recomputation", "a block scales by whether its input is a leaf of the graph")
def asks_whether_leaf(t: Trial) -> None:
    train(t, Net([_AsksLeaf(), _AsksLeaf()]))


class _ReadsNextGradient(Block):
    other: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gradient = self.other[0].grad if self.other else None
        return x + (0.5 if gradient is None else 1.0) * self.inner(x)


@attack("recomputation", "a block asks whether the head's weight has a gradient, which it has none in each forward")
def forward_asks_for_the_heads_gradient(t: Trial) -> None:
    model = Net([_ReadsNextGradient(), _ReadsNextGradient()])
    for block in model.blocks:
        block.other = [model.head.weight]
    optimizer = sgd(model)
    train(t, model, optimizer, after=lambda _: optimizer.zero_grad())
