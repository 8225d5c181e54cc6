"""A block counts its calls on what belongs to a library, by ways that name no attribute in its code: `setattr`, `vars`, an object of a library's module."""

import logging
import math
import random
from collections.abc import Callable

import numpy as np
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


def _set_and_put_back(
    t: Trial, put: Callable[[], object], put_back: Callable[[], object], left: Callable[[], object]
) -> None:
    class Setting(Block):
        def inner(self, x: torch.Tensor) -> torch.Tensor:
            put()
            return super().inner(x)

    model = Net([Setting(), Setting()])
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        x, y = tokens(step)
        loss = model(x, y)
        put_back()
        optimizer.zero_grad()
        loss.backward()
        t.note("left", left())
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "recomputation", "a block seeds Python's random numbers, and the loop seeds them otherwise before the backward pass"
)
def seeded_between(t: Trial) -> None:
    _set_and_put_back(t, lambda: random.seed(3), lambda: random.seed(5), random.random)


@attack("recomputation", "a block writes to a table of numpy's, and the loop clears it before the backward pass")
def table_cleared_between(t: Trial) -> None:
    table = np.zeros(3)
    _set_and_put_back(t, lambda: table.fill(1.0), lambda: table.fill(0.0), lambda: float(table.sum()))


@attack("recomputation", "a block asks for deterministic algorithms, and the loop does not before the backward pass")
def deterministic_in_block(t: Trial) -> None:
    ask = torch.use_deterministic_algorithms
    _set_and_put_back(t, lambda: ask(True), lambda: ask(False), torch.are_deterministic_algorithms_enabled)
