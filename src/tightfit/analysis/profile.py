"""The profile of a run: its tape on one device, with everything derived from it once: seconds, module calls, blocks, optimizer, loss head, attention.

Techniques derive their options from a profile, so that a tape is analysed in one place and not anew by each of them.
"""

import dataclasses
from functools import cached_property

import numpy as np

from tightfit.analysis.attention import ScoreRun, score_runs
from tightfit.analysis.loss_head import LossHead, loss_heads
from tightfit.analysis.modules import ModuleCalls
from tightfit.analysis.optimizer import OptimizerProfile
from tightfit.analysis.recomputable import BATCH_NORMS, RecomputableBlock, blocks
from tightfit.analysis.sequences import LayerSequence, layer_sequences
from tightfit.analysis.trained_parts import TrainedParts
from tightfit.cost.classes import TENSOR_CORE_CLASSES, operator_class
from tightfit.cost.efficiency import Efficiency, efficiency_of
from tightfit.cost.host_python import seconds_of_own_work
from tightfit.cost.roofline import is_kernel, operator_seconds
from tightfit.cost.steps import step_operators
from tightfit.devices.device import Device
from tightfit.planner.sides import Sides
from tightfit.tape import Column, EventKind, Phase, Tape, WaitKind

_WAITS_OF_HOST = (WaitKind.HOST_FOR_EVENT, WaitKind.HOST_FOR_STREAM, WaitKind.HOST_FOR_DEVICE, WaitKind.HOST_READS)


# Lazy because techniques differ in what they need: a plan without micro-batches never looks for a loss head. No slots,
# as cached properties are kept in the instance's dict.
@dataclasses.dataclass(frozen=True, eq=False)
class Profile:
    """The analyses of a run; each is computed on first use and cached."""

    tape: Tape
    device: Device

    @cached_property
    def seconds(self) -> Column:
        """Seconds of each operator on the device."""
        return operator_seconds(self.tape, self.device)

    @cached_property
    def is_kernel(self) -> Column:
        """Which operators launch kernels; views and allocations do not."""
        return is_kernel(self.tape)

    @cached_property
    def is_product(self) -> Column:
        """Which operators are matrix products, convolutions or attention: of few rows, they take more than the launch of a kernel."""
        names = self.tape.operators.name
        known = [i for i in np.unique(names) if operator_class(self.tape.strings[i]) in TENSOR_CORE_CLASSES]
        return np.isin(names, known)

    @cached_property
    def is_batch_norm(self) -> Column:
        """Which operators are batch norms of a forward pass."""
        known = [i for i, text in enumerate(self.tape.strings) if text.startswith(BATCH_NORMS)]
        return np.isin(self.tape.operators.name, known)

    @cached_property
    def num_steps(self) -> int:
        """Steps of the program's loop; 1 where the tape has none, as it is a divisor."""
        return max(1, len(step_operators(self.tape)))

    @property
    def issue_seconds(self) -> float:
        """The host's time to issue a kernel."""
        return self.efficiency.issue_seconds

    @cached_property
    def efficiency(self) -> Efficiency:
        """What the device reaches of its peak rates, and its fixed costs."""
        return efficiency_of(self.device)

    @property
    def launch_seconds(self) -> float:
        """The card's time for a kernel that does next to nothing."""
        return self.efficiency.launch_seconds

    @cached_property
    def host_waits(self) -> bool:
        """Whether the host waits for the card in each step: for a value, or for a copy that is not beside it."""
        begin, end = self._last_step
        waits, copies = self.tape.waits, self.tape.copies
        is_wait = np.isin(waits.kind, _WAITS_OF_HOST) & (waits.operator >= begin) & (waits.operator <= end)
        is_copy = copies.is_blocking & (copies.operator >= begin) & (copies.operator < end)
        return bool(is_wait.any() or is_copy.any())

    @property
    def _last_step(self) -> tuple[int, int]:
        return (step_operators(self.tape) or [(0, len(self.tape.operators))])[-1]

    @cached_property
    def step(self) -> Sides:
        """What the card and the host take for the last step, which stands for all; copies run beside kernels."""
        begin, end = self._last_step
        seconds = self.seconds.copy()
        seconds[self.tape.copies.operator] = 0.0
        issued = self.issue_seconds * int(self.is_kernel[begin:end].sum())
        on_host = issued + seconds_of_own_work(self.tape, begin, end)
        if self.host_waits:
            on_host += self._seconds_after_last_issue(seconds[begin:end], begin)
        return Sides(on_card=float(seconds[begin:end].sum()), on_host=on_host)

    def _seconds_after_last_issue(self, seconds: Column, begin: int) -> float:
        """Of a step that the host issues no faster than the card runs it: how long it waits for what follows the backward pass, and for its own last kernels."""
        is_backward = self.tape.operators.phase[begin : begin + len(seconds)] == Phase.BACKWARD
        first = int(np.flatnonzero(is_backward)[-1]) + 1 if is_backward.any() else len(seconds)
        issue = self.issue_seconds * self.is_kernel[begin + first : begin + len(seconds)]
        left = np.cumsum(seconds[first:][::-1])[::-1] - (issue.sum() - np.cumsum(issue))
        return float(left.max(initial=0.0))

    @cached_property
    def allocated_at(self) -> Column:
        """The event that allocates each storage."""
        allocations = np.flatnonzero(self.tape.events.kind == EventKind.ALLOCATE)
        at = np.zeros(len(self.tape.storages), dtype=np.int64)
        at[self.tape.events.storage[allocations]] = allocations
        return at

    @cached_property
    def modules(self) -> ModuleCalls:
        """The module calls of the run."""
        return ModuleCalls(self.tape)

    @cached_property
    def blocks(self) -> tuple[RecomputableBlock, ...]:
        """The modules that are worth recomputing, outermost first."""
        return tuple(blocks(self.modules))

    @cached_property
    def calls_of_blocks(self) -> tuple[Column, Column]:
        """The operators `[begin, end)` of all calls of blocks, as a column of begins and one of ends."""
        calls = [(call.begin, call.end) for block in self.blocks for call in block.calls]
        begins, ends = np.array(calls, dtype=np.int64).reshape(-1, 2).T
        return begins, ends

    @cached_property
    def sequences(self) -> tuple[LayerSequence, ...]:
        """The sequences of numbered children that ran one after another."""
        return tuple(layer_sequences(self.modules))

    @cached_property
    def optimizer(self) -> OptimizerProfile:
        """The optimizer steps of the run."""
        return OptimizerProfile(self)

    @cached_property
    def trained_parts(self) -> TrainedParts:
        """The trained parameters, by module."""
        return TrainedParts(self)

    @cached_property
    def loss_heads(self) -> tuple[LossHead, ...]:
        """The calls of linear heads that feed a cross-entropy."""
        return tuple(loss_heads(self.modules))

    @cached_property
    def score_runs(self) -> tuple[ScoreRun, ...]:
        """The attentions that materialise their scores."""
        return tuple(score_runs(self.modules))
