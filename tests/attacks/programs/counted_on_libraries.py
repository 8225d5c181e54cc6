"""A block counts its calls on what belongs to a library, by ways that name no attribute in its code: `setattr`, `vars`, an object of a library's module."""

import logging
import math
from collections.abc import Callable

import torch
from tests.attacks.models import Block, Net, sgd, tokens
from tests.attacks.registry import attack
from tests.attacks.trial import Trial


def _train(t: Trial, count: Callable[[], None], counted: Callable[[], int]) -> None:
    class Counting(Block):
        def inner(self, x: torch.Tensor) -> torch.Tensor:
            count()
            return super().inner(x)

    model = Net([Counting(), Counting()])
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        x, y = tokens(step)
        loss = model(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.note("calls", counted())
        t.end_step()


@attack("recomputation", "calls are counted by setattr on a module of Python's")
def counted_by_setattr(t: Trial) -> None:
    def count() -> None:
        setattr(math, "calls_of_blocks", getattr(math, "calls_of_blocks") + 1)  # noqa: B009, B010 - what is tried

    vars(math)["calls_of_blocks"] = 0
    _train(t, count, lambda: vars(math)["calls_of_blocks"])


@attack("recomputation", "calls are counted in the table of a module of Python's")
def counted_in_table_of_module(t: Trial) -> None:
    def count() -> None:
        vars(math)["calls_in_table"] += 1

    vars(math)["calls_in_table"] = 0
    _train(t, count, lambda: vars(math)["calls_in_table"])


@attack("recomputation", "calls are counted on the root logger")
def counted_on_root_logger(t: Trial) -> None:
    def count() -> None:
        logging.root.calls_of_blocks += 1  # type: ignore[attr-defined]

    vars(logging.root)["calls_of_blocks"] = 0
    _train(t, count, lambda: vars(logging.root)["calls_of_blocks"])
