"""What is written past torch's count of versions so that sums and norms stay as they were: rows, columns and signs change places."""

from collections.abc import Callable

import torch
from tests.attacks.models import WIDTH, Net, adamw, sgd, tokens
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn


def _before_step(t: Trial, change: Callable[[nn.Module, torch.Tensor], object], model: nn.Module | None = None) -> None:
    model = model or Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(5):
        x, y = tokens(step)
        loss = model(x, y)
        optimizer.zero_grad()
        loss.backward()
        if step >= 2:
            with torch.no_grad():
                change(model, x)
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("gradients", "a loader mirrors the batch through numpy, for the next step, before the optimizer steps")
def batch_mirrored_before_step(t: Trial) -> None:
    def mirror(_: nn.Module, x: torch.Tensor) -> None:
        x.numpy()[...] = x.numpy()[..., ::-1].copy()

    _before_step(t, mirror)


@attack("gradients", "a loader negates two columns of the batch through numpy before the optimizer steps")
def columns_negated_before_step(t: Trial) -> None:
    def negate(_: nn.Module, x: torch.Tensor) -> None:
        x.numpy()[..., 2:4] *= -1

    _before_step(t, negate)


class _Linear(Net):
    """Without blocks between the stem and the head."""

    def __init__(self) -> None:
        super().__init__([nn.Identity()])
        self.middle = nn.Linear(WIDTH, WIDTH)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.middle(super().features(x))


@attack("gradients", "the columns of a weight change places through .data before the optimizer steps")
def weight_mirrored_before_step(t: Trial) -> None:
    t.writes_within_step("middle.weight")

    def mirror(model: nn.Module, _: torch.Tensor) -> None:
        model.middle.weight.data.copy_(model.middle.weight.flip(1))

    _before_step(t, mirror, _Linear())


def _between_steps(t: Trial, change: Callable[[nn.Module], object]) -> None:
    model = Net()
    optimizer = adamw(model)
    t.apply(model, optimizer)
    for step in range(5):
        x, y = tokens(step)
        loss = model(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()
        with torch.no_grad():
            change(model)


@attack("gradients", "the signs of weights are changed through .data between steps")
def weights_negated_between_steps(t: Trial) -> None:
    def negate(model: nn.Module) -> None:
        for parameter in model.blocks.parameters():
            parameter.data.neg_()

    _between_steps(t, negate)


@attack("gradients", "the halves of weights change places through .data between steps")
def weights_rolled_between_steps(t: Trial) -> None:
    def roll(model: nn.Module) -> None:
        for parameter in model.blocks.parameters():
            parameter.data.copy_(parameter.roll(4, -1))

    _between_steps(t, roll)
