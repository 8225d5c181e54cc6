"""What is written past torch's count of versions, between the forward and the backward pass, as older optimizers and loaders write, and in blocks."""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tests.attacks.models import Block, Net, sgd, tokens, train
from tests.attacks.places import EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn


def _written(
    t: Trial, change: Callable[[nn.Module, torch.Tensor], Any], model: nn.Module | None = None, *, since: int = 2
) -> None:
    model = model or Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    t.writes_within_step("")
    for step in range(5):
        x, y = tokens(step)
        loss = model(x, y)
        if step >= since:
            with torch.no_grad():
                change(model, x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("parts", "the head's weight is scaled through .data between forward and backward pass, in later steps")
def head_scaled_between(t: Trial) -> None:
    _written(t, lambda model, _: model.head.weight.data.mul_(0.9))


@attack(
    "recomputation", "one number of a norm in a block is scaled through .data between forward and backward pass, later"
)
def norm_scaled_between(t: Trial) -> None:
    def scale(model: nn.Module, _: torch.Tensor) -> None:
        model.blocks[1].norm.weight.data[0] *= 0.9

    _written(t, scale)


@attack(
    "recomputation",
    "weights of blocks are clamped through .data between forward and backward pass, from the third step on",
)
def blocks_clamped_between(t: Trial) -> None:
    def clamp(model: nn.Module, _: torch.Tensor) -> None:
        for p in model.blocks.parameters():
            p.data.clamp_(-0.25, 0.25)

    _written(t, clamp)


@attack("parts", "the batch is scaled through .data between forward and backward pass, in later steps")
def batch_scaled_between(t: Trial) -> None:
    _written(t, lambda _, x: x.data.mul_(0.5))


@attack(
    "parts", "the batch is written through numpy between forward and backward pass, in later steps (a loader's room)"
)
def batch_written_by_numpy(t: Trial) -> None:
    def write(_: nn.Module, x: torch.Tensor) -> None:
        x.numpy()[...] = tokens(7)[0].numpy()

    _written(t, write)


class _Old(torch.optim.Optimizer):
    """Plain descent as it was written years ago: everything through .data."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data.add_(p.grad.data, alpha=-group["lr"])


@attack(
    "gradients",
    "the forward of the next batch runs before the step of this one, its backward pass after it (stale, through .data)",
)
def stale_forward(t: Trial) -> None:
    model = Net()
    optimizer = _Old(model.parameters(), 0.1)
    t.apply(model, optimizer)
    waiting = model(*tokens(0))
    for step in range(5):
        optimizer.zero_grad()
        waiting.backward()
        if step >= 2:
            waiting = model(*tokens(step + 1))
            optimizer.step()
        else:
            optimizer.step()
            waiting = model(*tokens(step + 1))
        t.note("loss", waiting)
        t.end_step()


@attack(
    "recomputation",
    "weights are made binary for the forward and put back before the backward pass (a binary net's bug)",
)
def binary_for_the_forward(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model, momentum=0.0)
    t.apply(model, optimizer)
    t.writes_within_step("")
    for step in range(5):
        kept = {p: p.data.clone() for p in model.blocks.parameters() if p.dim() > 1}
        if step >= 2:
            for p in kept:
                p.data.copy_(p.data.sign() * p.data.abs().mean())
        loss = model(*tokens(step))
        for p, before in kept.items():
            p.data.copy_(before)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("gradients", "the loss of the batch is written through .data, and its graph stays (a logged scale)")
def loss_written_between(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        loss = model(*tokens(step))
        total = loss * loss
        loss.data.mul_(0.5)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        t.note("losses", [loss, total])
        t.end_step()


class Clock:
    """The number of the step, as a training script has it at hand."""

    step = 0


def _tick(step: int) -> None:
    Clock.step = step


def _counted_past_torch(t: Trial, count: Callable[[torch.Tensor], object]) -> None:
    table = torch.zeros(5000, 4)

    class Counted(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if Clock.step >= 4 and self.training:
                count(table)
            return super().forward(x)

    def after(_: int) -> None:
        t.note("counted", table[3].clone())

    train(t, Net([Counted(), Counted()]), num_steps=7, before=_tick, after=after)


@attack("parts", "from step 4 on a block counts in a large table through .data, which the loop reads", only=EXACT)
def late_data_of_large_table(t: Trial) -> None:
    _counted_past_torch(t, lambda table: table.data[3].add_(1))


@attack("parts", "from step 4 on a block counts in a large table through an array of DLPack's", only=EXACT)
def late_dlpack_of_large_table(t: Trial) -> None:
    _counted_past_torch(t, lambda table: operator.iadd(np.from_dlpack(table)[3], 1))
