"""Functions that a block calls, replaced between its forward and its backward pass by others that write: plain, nothing calls the new ones."""

import sys
import types
from collections.abc import Callable

import torch
from tests.attacks.models import Block, Net, sgd, tokens
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional

ACTIVATION = types.SimpleNamespace(calls=0)


def _activate(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x)


def _counted(x: torch.Tensor) -> torch.Tensor:
    ACTIVATION.calls += 1
    return functional.gelu(x)


activate = _activate


def _replace(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    sys.modules[__name__].activate = function


class Calling(Block):
    """A block that calls a function of this file by its name."""

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(activate(self.wide(self.norm(x))))


def _with_another(t: Trial, model: nn.Module, *, first: int) -> None:
    """From step `first` on `activate` is another function whenever a backward pass runs."""
    _replace(_activate)
    ACTIVATION.calls = 0
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(6):
        loss = model(*tokens(step))
        optimizer.zero_grad()
        if step >= first:
            _replace(_counted)
        try:
            loss.backward()
        finally:
            _replace(_activate)
        optimizer.step()
        t.note("loss", loss)
        t.note("calls", ACTIVATION.calls)
        t.end_step()


@attack("recomputation", "a function that blocks call is replaced by one that counts, around each backward pass")
def function_replaced_around_backward(t: Trial) -> None:
    _with_another(t, Net([Calling(), Calling()]), first=0)


@attack("recomputation", "the same from the fifth step on, after the steps that are checked")
def function_replaced_around_late_backward(t: Trial) -> None:
    _with_another(t, Net([Calling(), Calling()]), first=4)


@attack("recomputation", "a method of a block's class is replaced by one that counts, around each backward pass")
def method_replaced_around_backward(t: Trial) -> None:
    calls = [0]

    class Own(Block):
        def activation(self, x: torch.Tensor) -> torch.Tensor:
            return functional.gelu(x)

        def inner(self, x: torch.Tensor) -> torch.Tensor:
            return self.narrow(self.activation(self.wide(self.norm(x))))

    def counted(self: Own, x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return functional.gelu(x)

    model, plain = Net([Own(), Own()]), Own.activation
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(6):
        loss = model(*tokens(step))
        optimizer.zero_grad()
        Own.activation = counted  # type: ignore[method-assign]
        try:
            loss.backward()
        finally:
            Own.activation = plain  # type: ignore[method-assign]
        optimizer.step()
        t.note("loss", loss)
        t.note("calls", calls[0])
        t.end_step()
