"""The profile of a run: its tape on one device, with everything derived from it once: costs, module calls, blocks, optimizer, loss head, attention.

Techniques derive their options from a profile, so that a tape is analysed in one place and not anew by each of them.
"""

import dataclasses
from functools import cached_property

import numpy as np

from tightfit.analysis.attention import ScoreRun, score_runs
from tightfit.analysis.lifetimes import StorageLifetimes
from tightfit.analysis.loss_head import LossHead, loss_heads
from tightfit.analysis.modules import ModuleCalls
from tightfit.analysis.operator_costs import OperatorCosts
from tightfit.analysis.optimizer import OptimizerProfile
from tightfit.analysis.recomputable import RecomputableBlock, blocks
from tightfit.analysis.sequences import LayerSequence, layer_sequences
from tightfit.analysis.step_sides import sides_of_step
from tightfit.cost.steps import step_operators
from tightfit.devices.device import Device
from tightfit.planner.sides import Sides
from tightfit.tape import Column, Tape


# Lazy because techniques differ in what they need: a plan without micro-batches never looks for a loss head. No slots,
# as cached properties are kept in the instance's dict.
@dataclasses.dataclass(frozen=True, eq=False)
class Profile:
    """The analyses of a run; each is computed on first use and cached."""

    tape: Tape
    device: Device

    @cached_property
    def costs(self) -> OperatorCosts:
        """What its operators cost on the device."""
        return OperatorCosts(self.tape, self.device)

    @cached_property
    def num_steps(self) -> int:
        """Steps of the program's loop; 1 where the tape has none, as it is a divisor."""
        return max(1, len(step_operators(self.tape)))

    @cached_property
    def step(self) -> Sides:
        """What the card and the host take for the last step, which stands for all."""
        return sides_of_step(self.costs)

    @cached_property
    def lifetimes(self) -> StorageLifetimes:
        """When its storages are allocated and freed."""
        return StorageLifetimes(self.tape)

    @cached_property
    def modules(self) -> ModuleCalls:
        """The module calls of the run."""
        return ModuleCalls(self.lifetimes)

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
        """The optimizer steps of the run, and what they train."""
        return OptimizerProfile(self)

    @cached_property
    def loss_heads(self) -> tuple[LossHead, ...]:
        """The calls of linear heads that feed a cross-entropy."""
        return tuple(loss_heads(self.modules))

    @cached_property
    def score_runs(self) -> tuple[ScoreRun, ...]:
        """The attentions that materialise their scores."""
        return tuple(score_runs(self.modules))
