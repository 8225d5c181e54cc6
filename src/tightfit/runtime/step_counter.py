"""Counts the steps of a run while it is recorded, from the steps of its optimizers or from the user's own marks."""

import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from tightfit.capture.steps.wrapping_optimizers import holds_another
from tightfit.tape.step_ends import ends_step
from tightfit.torch_hooks.weak_references import WeakTable


class StepCounter:
    """An estimate while the program runs; which steps of optimizers end one of the program is decided when the run is over."""

    def __init__(self) -> None:
        self.num_steps = 0
        """The steps that are over, as far as can be told meanwhile."""
        self._numbers: WeakTable[torch.Tensor | Optimizer, int] = WeakTable()
        self._num_numbers = 0
        self._num_steps_of: WeakTable[Optimizer, int] = WeakTable()
        self._made_before: WeakTable[Optimizer, None] = WeakTable()
        self._is_told_by_user = False

    def begin(self) -> None:
        """The run begins."""
        # Whether these are of the run that begins, or left over from one before, shows only when they step.
        for optimizer in all_optimizers():
            self._made_before[optimizer] = None

    def mark(self) -> None:
        """The user marks the end of a step; from then on only these marks count."""
        if not self._is_told_by_user:
            self._is_told_by_user = True
            self.num_steps = 0
        self.num_steps += 1

    def number(self, optimizer: Optimizer) -> int:
        """The number of an optimizer; optimizers constructed anew in each iteration for the same parameters count as one."""
        # Groups may be empty, all of them too.
        first: torch.Tensor | Optimizer = next(iter(parameters_of(optimizer)), optimizer)
        if first not in self._numbers:
            self._numbers[first] = self._num_numbers
            self._num_numbers += 1
        return self._numbers[first]

    def count(self, optimizer: Optimizer) -> None:
        """A step ends when the slowest optimizer has stepped; one that was made in this run and has not stepped yet is waited for."""
        counts = self._num_steps_of
        if optimizer not in counts:
            for known in all_optimizers():
                if known is optimizer or (known not in self._made_before and not holds_another(known)):
                    counts.setdefault(known, 0)
        counts[optimizer] += 1
        if not self._is_told_by_user and ends_step(list(counts.values()), counts[optimizer], self.num_steps):
            self.num_steps += 1


def objects_of(kind: type) -> list[Any]:
    """The objects of a class that Python's garbage collector tracks."""
    # type() and not isinstance(): some objects run code of their own when their class is read.
    return [found for found in gc.get_objects() if issubclass(type(found), kind)]


def all_optimizers() -> Iterator[Optimizer]:
    """The optimizers that step themselves; wrappers by other libraries, which did not run the base class's constructor, are left out."""
    return (found for found in objects_of(Optimizer) if "_optimizer_step_pre_hooks" in found.__dict__)


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """The parameters of all groups of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
