"""The optimizer steps of a tape: the gradients and states they use, their temporaries, and their seconds.

A `OptimizerRange` is a range of consecutive operators of the phase OPTIMIZER. Bytes are those of the allocator's blocks. `optimizer_algorithm` finds which
implementation ran, `gradient_readers` what else reads the gradients.
"""

import dataclasses
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from tightfit.analysis.intervals import memory_timeline, runs_of
from tightfit.analysis.trained_parts import TrainedParts
from tightfit.cost.efficiency import efficiency_of
from tightfit.planner.sides import Sides
from tightfit.tape import Category, Column, Phase, SpanKind

if TYPE_CHECKING:
    from tightfit.analysis.profile import Profile


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerRange:
    """One optimizer step: operators `[begin, end)`, events `[begin_event, end_event)`, estimated seconds on either side."""

    begin: int
    end: int
    begin_event: int
    end_event: int
    sides: Sides


class OptimizerProfile:
    """The optimizer steps of a tape, with their time on a device."""

    def __init__(self, profile: "Profile") -> None:
        self.tape = profile.tape
        self.device = profile.device
        self.modules = profile.modules
        self.operator_seconds = profile.costs.seconds
        self.is_kernel = profile.costs.is_kernel
        self.is_product = profile.costs.is_product
        self.num_steps = profile.num_steps
        self.step = profile.step
        self.block_bytes = profile.lifetimes.block_bytes
        self.allocated_at = profile.lifetimes.allocated_at
        self.freed_at = profile.lifetimes.freed_at
        # Taken from the profile rather than computed again: each is a pass over all operators or events of the tape.
        self.step_ranges = self._find_stretches()
        self._names: dict[OptimizerRange, tuple[str, ...]] = {}

    def _find_stretches(self) -> tuple[OptimizerRange, ...]:
        runs = runs_of(self.tape.operators.phase == Phase.OPTIMIZER)
        return tuple(
            OptimizerRange(
                begin=begin,
                end=end,
                begin_event=int(self.modules.lifetimes.event_of(begin)),
                end_event=int(self.modules.lifetimes.event_of(end)),
                sides=self.sides_of(begin, end),
            )
            for begin, end in runs
            # A step that finds no gradient can leave views and host operators in the phase, but launches no kernel.
            if self.is_kernel[begin:end].any()
        )

    def sides_of(self, begin: int, end: int) -> Sides:
        """Seconds of these operators."""
        # A for-loop optimizer over many small parameters is bound by the host: thousands of kernels of a few microseconds each.
        issued = efficiency_of(self.device).issue_seconds * int(self.is_kernel[begin:end].sum())
        return Sides(on_card=float(self.operator_seconds[begin:end].sum()), on_host=issued)

    @property
    def steady(self) -> tuple[OptimizerRange, ...]:
        """The optimizer steps of the last step of the user's loop, which stands for all: the first one allocates the states as well."""
        spans = self.tape.spans
        begins = spans.begin[spans.kind == SpanKind.STEP]
        last = tuple(s for s in self.step_ranges if len(begins) and s.begin_event >= begins[-1])
        return last or self.step_ranges[-1:]

    @cached_property
    def trained_parts(self) -> TrainedParts:
        """The trained parameters, by module."""
        return TrainedParts(self)

    @property
    def sides(self) -> Sides:
        """Seconds of the optimizers per step of the user's loop."""
        return sum((s.sides for s in self.steady), Sides())

    def names(self, step_range: OptimizerRange) -> tuple[str, ...]:
        """The operators of an optimizer step that launch kernels, without namespace and overload: `_foreach_add_`."""
        if step_range not in self._names:
            at = np.flatnonzero(self.is_kernel[step_range.begin : step_range.end]) + step_range.begin
            found = self.tape.operators.name[at].tolist()
            short = {n: self.tape.strings[n].split(".")[1] for n in set(found)}
            self._names[step_range] = tuple(short[n] for n in found)
        return self._names[step_range]

    def gradients(self, step_range: OptimizerRange) -> Column:
        """The gradients, as indices of storages, that are allocated when an optimizer step begins."""
        return self._alive(step_range.begin_event, Category.GRADIENTS)

    def state(self, step_range: OptimizerRange) -> Column:
        """The optimizer states, as indices of storages, that are allocated when an optimizer step ends."""
        return self._alive(step_range.end_event, Category.OPTIMIZER_STATE)

    def _alive(self, event: int, category: Category) -> Column:
        of_kind = self.tape.storages.category == category
        return np.flatnonzero(of_kind & (self.allocated_at < event) & (self.freed_at >= event))

    def held(self, step_range: OptimizerRange) -> list[tuple[int, int, int]]:
        """The optimizer's temporaries during a step, states not included: (begin event, end event, bytes), disjoint, in order."""
        inside = (self.allocated_at >= step_range.begin_event) & (self.freed_at <= step_range.end_event)
        temporary = np.flatnonzero(inside & (self.tape.storages.category == Category.TEMPORARIES))
        return memory_timeline(self.allocated_at[temporary], self.freed_at[temporary], self.block_bytes[temporary])


def sides_of_update(run: OptimizerProfile, num_bytes: float, num_kernels: int) -> Sides:
    """Seconds of `num_kernels` kernels that together read and write `num_bytes`."""
    efficiency = efficiency_of(run.device)
    traffic = num_bytes / (run.device.dram_bytes_per_second * efficiency.of_bandwidth["optimizer"])
    return Sides(
        on_card=traffic + num_kernels * efficiency.launch_seconds, on_host=num_kernels * efficiency.issue_seconds
    )


def sides_of_kernels(run: OptimizerProfile, step_range: OptimizerRange, num_kernels: int) -> Sides:
    """Seconds of an optimizer step if it did the same with this many kernels."""
    efficiency = efficiency_of(run.device)
    more = num_kernels - int(run.is_kernel[step_range.begin : step_range.end].sum())
    on_card = float(run.operator_seconds[step_range.begin : step_range.end].sum()) + more * efficiency.launch_seconds
    return Sides(on_card=on_card, on_host=num_kernels * efficiency.issue_seconds)


def events_of(run: OptimizerProfile, runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges of operators as ranges of events."""
    return [
        (int(run.modules.lifetimes.event_of(begin)), int(run.modules.lifetimes.event_of(end))) for begin, end in runs
    ]


def passes_of(run: OptimizerProfile) -> list[tuple[int, int]]:
    """Each forward pass with the backward pass that follows it, as a range of events."""
    phases = run.tape.operators.phase
    at = np.flatnonzero(np.isin(phases, (Phase.FORWARD, Phase.BACKWARD)))
    if not len(at):
        return []
    breaks = np.flatnonzero((phases[at][:-1] == Phase.BACKWARD) & (phases[at][1:] == Phase.FORWARD))
    begins, ends = at[np.r_[0, breaks + 1]], at[np.r_[breaks, len(at) - 1]] + 1
    return events_of(run, zip(begins.tolist(), ends.tolist(), strict=True))
