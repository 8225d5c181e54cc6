"""Marks of optimizers: what code that may be run again does to them, a rate that it lowers, say, is done twice by two runs of it."""

import weakref
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch


class OptimizerMarks:
    """The settings and states of the optimizers that code can reach, as they are now."""

    def __init__(self, references: Iterable[weakref.ref[torch.optim.Optimizer]]) -> None:
        self._optimizers = [
            optimizer for optimizer in [reference() for reference in references] if optimizer is not None
        ]
        self._marks = [*map(_marks_of_optimizer, self._optimizers)]

    def change(self) -> str:
        """What was done to one of them since, in words; empty if nothing was."""
        is_same = self._marks == [*map(_marks_of_optimizer, self._optimizers)]
        return "" if is_same else "changes an optimizer"


def _marks_of_optimizer(optimizer: torch.optim.Optimizer) -> Any:
    groups = [
        [(name, [*map(id, value)] if name == "params" else _mark(value)) for name, value in group.items()]
        for group in optimizer.param_groups
    ]
    # Those of a technique are made when they are read, and only then.
    states = optimizer.state if type(optimizer.state) is defaultdict else {}
    # A program may keep a count there as well.
    return groups, [
        [(name, _mark(value)) for name, value in state.items()] if isinstance(state, dict) else _mark(state)
        for state in states.values()
    ]


def _mark(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return id(value), -1 if value.is_inference() else value._version
    if isinstance(value, list | tuple):
        return [_mark(each) for each in value]
    return value if value is None or isinstance(value, bool | int | float | complex | str) else id(value)
