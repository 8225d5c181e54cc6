"""What a tape tells of the optimizer: when it steps, how much it updates, how long that takes and what it holds meanwhile.

A stretch is a run of operators of the phase OPTIMIZER. Bytes are those of the allocator's blocks. Which implementation ran is told in
`optimizer_algorithm`, who else reads the gradients in `gradient_readers`.
"""

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from tightfit.analysis.intervals import levels, runs_of
from tightfit.cost.efficiency import efficiency_of
from tightfit.tape import Category, Column, Phase, SpanKind

if TYPE_CHECKING:
    from tightfit.analysis.profile import Profile


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """One run of the optimizer: operators `begin` to before `end`, events `begin_event` to before `end_event`; `seconds` it takes."""

    begin: int
    end: int
    begin_event: int
    end_event: int
    seconds: float


class OptimizerProfile:
    """The optimizer's part of a tape, on a card."""

    def __init__(self, profile: "Profile") -> None:
        self.tape = profile.tape
        self.device = profile.device
        self.modules = profile.modules
        self.operator_seconds = profile.seconds
        self.is_kernel = profile.is_kernel
        self.num_steps = profile.num_steps
        self.block_bytes = profile.modules.block_bytes
        self.born = profile.allocated_at
        self.died = profile.modules.died
        self.stretches = self._find_stretches()

    def _find_stretches(self) -> tuple[Stretch, ...]:
        runs = runs_of(self.tape.operators.phase == Phase.OPTIMIZER)
        return tuple(
            Stretch(
                begin=begin,
                end=end,
                begin_event=int(self.modules.event_of(begin)),
                end_event=int(self.modules.event_of(end)),
                seconds=self.seconds_of(begin, end),
            )
            for begin, end in runs
            if self.is_kernel[begin:end].any()
        )

    def seconds_of(self, begin: int, end: int) -> float:
        """What these operators take: the card's time or the host's to issue them, whichever is longer."""
        issued = efficiency_of(self.device).issue_seconds * int(self.is_kernel[begin:end].sum())
        return max(float(self.operator_seconds[begin:end].sum()), issued)

    @property
    def steady(self) -> tuple[Stretch, ...]:
        """The stretches of the last step of the user's loop, which stands for all: the first one makes states as well."""
        spans = self.tape.spans
        begins = spans.begin[spans.kind == SpanKind.STEP]
        last = tuple(s for s in self.stretches if len(begins) and s.begin_event >= begins[-1])
        return last or self.stretches[-1:]

    @property
    def seconds(self) -> float:
        """What the optimizers take per step of the user's loop."""
        return sum(s.seconds for s in self.steady)

    def names(self, stretch: Stretch) -> list[str]:
        """The operators of a stretch that run kernels, without namespace and overload: `_foreach_add_`."""
        at = np.flatnonzero(self.is_kernel[stretch.begin : stretch.end]) + stretch.begin
        return [self.tape.strings[n].split(".")[1] for n in self.tape.operators.name[at].tolist()]

    def gradients(self, stretch: Stretch) -> Column:
        """The gradients, as indices of storages, that live when a stretch begins."""
        return self._alive(stretch.begin_event, Category.GRADIENTS)

    def state(self, stretch: Stretch) -> Column:
        """The optimizer states, as indices of storages, that live when a stretch ends."""
        return self._alive(stretch.end_event, Category.OPTIMIZER_STATE)

    def _alive(self, event: int, category: Category) -> Column:
        of_kind = self.tape.storages.category == category
        return np.flatnonzero(of_kind & (self.born < event) & (self.died >= event))

    def held(self, stretch: Stretch) -> list[tuple[int, int, int]]:
        """What the optimizer holds besides its states while it steps: (event, event, bytes), disjoint, in order."""
        inside = (self.born >= stretch.begin_event) & (self.died <= stretch.end_event)
        temporary = np.flatnonzero(inside & (self.tape.storages.category == Category.TEMPORARIES))
        return levels(self.born[temporary], self.died[temporary], self.block_bytes[temporary])


def seconds_of_update(run: OptimizerProfile, num_bytes: float, num_kernels: int) -> float:
    """What `num_kernels` kernels take that read and write `num_bytes` between them."""
    efficiency = efficiency_of(run.device)
    traffic = num_bytes / (run.device.dram_bytes_per_second * efficiency.of_bandwidth["optimizer"])
    return max(traffic + num_kernels * efficiency.launch_seconds, num_kernels * efficiency.issue_seconds)


def seconds_of_kernels(run: OptimizerProfile, stretch: Stretch, num_kernels: int) -> float:
    """What a stretch would take if it did the same with this many kernels."""
    efficiency = efficiency_of(run.device)
    more = num_kernels - int(run.is_kernel[stretch.begin : stretch.end].sum())
    on_card = float(run.operator_seconds[stretch.begin : stretch.end].sum()) + more * efficiency.launch_seconds
    return max(on_card, num_kernels * efficiency.issue_seconds)


def events_of(run: OptimizerProfile, runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Stretches of operators as stretches of events."""
    return [(int(run.modules.event_of(begin)), int(run.modules.event_of(end))) for begin, end in runs]


def passes_of(run: OptimizerProfile) -> list[tuple[int, int]]:
    """Each forward pass with the backward pass that follows it, as a stretch of events."""
    phases = run.tape.operators.phase
    at = np.flatnonzero(np.isin(phases, (Phase.FORWARD, Phase.BACKWARD)))
    if not len(at):
        return []
    breaks = np.flatnonzero((phases[at][:-1] == Phase.BACKWARD) & (phases[at][1:] == Phase.FORWARD))
    begins, ends = at[np.r_[0, breaks + 1]], at[np.r_[breaks, len(at) - 1]] + 1
    return events_of(run, zip(begins.tolist(), ends.tolist(), strict=True))
