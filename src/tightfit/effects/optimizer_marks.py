"""Marks of optimizers: what code that may be run again does to them, a rate that it lowers, say, is done twice by two runs of it; and whose step it is that they make."""

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


def has_torchs_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step is that of a class of torch.optim: a subclass with a step of its own, or with other parts of torch's, may do anything."""
    classes, number = _classes_of(optimizer)
    inherited, own = classes[number].step, [vars(base) for base in classes[:number]]
    # torch puts its wrapper on the class of the first object that is made, also where the class has no step of its own.
    has_step = any("step" in names and _innermost(names["step"]) is not _innermost(inherited) for names in own)
    parts = {name for name in dir(classes[number]) if name.startswith("_") and not name.startswith("__")}
    return (
        classes[number] is not torch.optim.Optimizer and not has_step and not any(parts & names.keys() for names in own)
    )


def class_of_step(optimizer: torch.optim.Optimizer) -> str:
    """The name of the class of torch.optim whose step the optimizer makes; with its module before it that of another class."""
    if has_torchs_step(optimizer):
        classes, number = _classes_of(optimizer)
        return classes[number].__name__
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _classes_of(optimizer: torch.optim.Optimizer) -> tuple[list[Any], int]:
    """Its classes, and which of them is the first of torch.optim."""
    classes = list(type(optimizer).__mro__)
    return classes, next(n for n, base in enumerate(classes) if f"{base.__module__}.".startswith("torch.optim."))


def _innermost(step: Any) -> Any:
    while getattr(step, "hooked", False):
        step = vars(step)["__wrapped__"]
    return step
