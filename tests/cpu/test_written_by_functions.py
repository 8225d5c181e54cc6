"""Which functions may write to something that stays: attributes, globals, and what the objects, modules and classes that they name may write."""

import enum
import functools
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tightfit.effects.bytecode.written_by_functions import may_write

COUNTS = {"calls": 0}
LAYER = nn.Linear(2, 2)


class Meter:
    count = 0

    @classmethod
    def add(cls) -> None:
        cls.count += 1


METER = Meter()


class Kind(enum.Enum):
    PLAIN = 1


class Pure(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        scaled = gradients[0] * math.pi * x.sum()
        return functional.gelu(scaled) if Kind.PLAIN.value else Pure.apply(scaled)


class Counting(Pure):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        COUNTS["calls"] += 1
        return x


def calls_layer(x: torch.Tensor) -> torch.Tensor:
    return LAYER(x)


def calls_meter(_: torch.Tensor) -> None:
    METER.add()


def calls_class(_: torch.Tensor) -> None:
    Meter.add()


def applies(x: torch.Tensor) -> torch.Tensor:
    return Pure.apply(x)


def applies_counting(x: torch.Tensor) -> torch.Tensor:
    return Counting.apply(x)


def queues(x: torch.Tensor) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(x.sum)


def of_closure(value: Any) -> Any:
    def function(x: torch.Tensor) -> Any:
        return value, x

    return function


@pytest.mark.parametrize("function", [Pure.backward, applies, of_closure(2.0), of_closure(torch.sin), of_closure([1])])
def test_what_writes_nothing(function: Any) -> None:
    assert not may_write(function)


@pytest.mark.parametrize(
    "function",
    [
        calls_layer,
        calls_meter,
        calls_class,
        applies_counting,
        queues,
        of_closure(METER),
        of_closure(METER.add),
        of_closure(LAYER),
        of_closure([].append),
        of_closure(functools.partial(calls_layer)),
        functools.partial(applies),
    ],
)
def test_what_may_write(function: Any) -> None:
    assert may_write(function)
