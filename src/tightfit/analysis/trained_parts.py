"""Which modules of a run are trained: their gradients and their share of the optimizer state; and the repeated blocks of the model.

A gradient is allocated in the backward pass of the module that owns the parameter. A tape does not say which module an optimizer state belongs
to: each module is given the share of them that it has of the gradients.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from tightfit.analysis.intervals import changes, memory_timeline
from tightfit.analysis.modules import ModuleCall
from tightfit.planner.option import Change
from tightfit.tape import Category, Column, Phase, Tape

if TYPE_CHECKING:
    from tightfit.analysis.optimizer import OptimizerProfile


MIN_BLOCKS = 2
# Of the operators of forward passes.
_MOST = 0.5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NumberedModules:
    """Modules in a list, `path.0` to `path.(number - 1)`, each called once per forward pass, and the modules that run before the first of them."""

    path: str
    number: int
    before: tuple[str, ...]


class TrainedParts:
    """The trained parts of a run."""

    def __init__(self, run: "OptimizerProfile") -> None:
        self.run = run
        self.tape: Tape = run.tape
        self.module_calls = run.modules

    @cached_property
    def gradients(self) -> Column:
        """The gradients, as indices of storages."""
        made = (self.tape.storages.category == Category.GRADIENTS) & (self.tape.storages.operator >= 0)
        return np.flatnonzero(made)

    def modules_of(self, storages: Column) -> list[str]:
        """The module whose operator allocated each storage."""
        operators = self.tape.storages.operator[storages]
        return [self.tape.strings[m] for m in self.tape.operators.module[operators].tolist()]

    @cached_property
    def memory_timeline(self) -> Column:
        """The memory timeline: allocated bytes after each event."""
        run = self.run
        difference = np.zeros(len(self.tape.events) + 1, dtype=np.int64)
        np.add.at(difference, run.allocated_at, run.block_bytes)
        np.subtract.at(difference, run.freed_at, run.block_bytes)
        return difference.cumsum()[:-1]

    def peak_with(self, changed: tuple[Change, ...]) -> int:
        """The peak of allocated bytes with these changes applied."""
        difference = np.zeros(len(self.memory_timeline) + 1, dtype=np.int64)
        for change in changed:
            difference[change.begin] += change.num_bytes
            difference[change.end] -= change.num_bytes
        return int((self.memory_timeline + difference.cumsum()[:-1]).max(initial=0))

    def untrained(self, frozen: Column) -> tuple[Change, ...]:
        """What freezing saves: the gradients that `frozen` marks, and their share of optimizer states and of the optimizer's temporaries."""
        run, gone = self.run, self.gradients[frozen]
        total = int(run.block_bytes[self.gradients].sum())
        # Adam's states have the size of the gradients; for factored states this is an approximation.
        share = int(run.block_bytes[gone].sum()) / total if total else 0.0
        state = np.flatnonzero(self.tape.storages.category == Category.OPTIMIZER_STATE)
        found = changes(memory_timeline(run.allocated_at[gone], run.freed_at[gone], run.block_bytes[gone]), -1.0)
        found += changes(memory_timeline(run.allocated_at[state], run.freed_at[state], run.block_bytes[state]), -share)
        for step_range in run.step_ranges:
            found += changes(run.held(step_range), -share)
        return found

    @cached_property
    def blocks(self) -> NumberedModules | None:
        """The longest list of blocks that run one after another; None without one."""
        counts: dict[str, int] = {}
        for path in self.module_calls.paths:
            parent, _, last = path.rpartition(".")
            if parent and last.isdigit():
                counts[parent] = max(counts.get(parent, 0), int(last) + 1)
        long = [path for path, number in counts.items() if number >= MIN_BLOCKS]
        best: NumberedModules | None = None
        for path in sorted(long, key=lambda p: (-counts[p], p.count("."))):
            calls = [self.module_calls.calls(f"{path}.{i}") for i in range(counts[path])]
            in_order = all(calls) and all(a[0].end <= b[0].begin for a, b in itertools.pairwise(calls))
            # A list inside of a numbered block (layers.0.experts) repeats within each layer and is no stack of layers, but where it is most of the model:
            # a pipeline of modules has one in its first (0.encoder.layer).
            is_inside = any(part.isdigit() for part in path.split("."))
            if in_order and not (is_inside and self._share_of_forward(calls) < _MOST):
                best = NumberedModules(path=path, number=counts[path], before=self._before(calls[0][0].begin))
                break
        return best

    def _share_of_forward(self, calls: Sequence[Sequence[ModuleCall]]) -> float:
        """The share of the operators of all forward passes that these modules run."""
        num_forward = int((self.tape.operators.phase == Phase.FORWARD).sum())
        return sum(call.end - call.begin for of_module in calls for call in of_module) / max(1, num_forward)

    def _before(self, operator: int) -> tuple[str, ...]:
        """The modules with operators of their own before `operator` in a forward pass; parents of the list may be among them."""
        operators = self.tape.operators
        at = np.flatnonzero(operators.phase[:operator] == Phase.FORWARD)
        names = dict.fromkeys(self.tape.strings[m] for m in operators.module[at].tolist())
        return tuple(name for name in names if name)
