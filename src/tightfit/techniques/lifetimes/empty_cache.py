"""Empties the allocator's cache between two phases of a step, so that segments that were split for one phase are not kept beside those of the next.

The blocks of a forward pass have other sizes than those of an optimizer step, and a segment that is split for the one may not fit the other.
The saving is found by replaying the traced run with the cache emptied there.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, final

from tightfit.allocator.settings import AllocatorSettings
from tightfit.analysis.intervals import runs_of
from tightfit.analysis.optimizer import OptimizerProfile, events_of, passes_of
from tightfit.analysis.profile import Profile
from tightfit.planner.option import Option
from tightfit.simulate.timeline_bytes import replay_timeline
from tightfit.simulate.with_empty_cache import with_emptied_cache
from tightfit.simulate.workspaces import with_workspaces_of
from tightfit.tape import Phase
from tightfit.techniques.technique import AbstractTechnique, ChosenOption

if TYPE_CHECKING:
    from tightfit.techniques.session import Session

SECONDS_PER_SEGMENT = 1.5e-3
"""To give a segment back and to ask for it again. A cudaMalloc of 64 MiB takes 1.2 ms (table of rtj1/cuda-mempool on GitHub); cudaFree waits for
the card besides."""

SMALLEST_SHARE = 0.02
"""Of what is reserved at the peak: what must be cached then, and what an emptied cache must save."""


@final
class EmptyCache(AbstractTechnique):
    """Trades driver calls, and a synchronisation, for memory that is reserved but unused."""

    name = "empty_cache"
    exact = True
    exactness = "bit for bit: the same blocks at other addresses"
    of_the_allocator = True

    def options(self, profile: Profile) -> Iterable[Option]:
        """One for each phase border at which it lowers the reserved peak."""
        with_workspaces = with_workspaces_of(profile.device, profile.tape)
        plain = replay_timeline(with_workspaces, AllocatorSettings())
        if not len(plain.reserved):
            return
        highest = int(plain.reserved.max())
        smallest = SMALLEST_SHARE * highest
        # The gap between reserved and allocated is all that an emptied cache could save.
        if highest - int(plain.allocated.max()) < smallest:
            return
        run = profile.optimizer
        for border, events in _borders(run).items():
            emptied = replay_timeline(with_emptied_cache(with_workspaces, events), AllocatorSettings())
            if highest - int(emptied.reserved.max()) >= smallest:
                yield Option(
                    technique=self.name,
                    where="allocator",
                    settings={"border": border},
                    changes=(),
                    seconds=SECONDS_PER_SEGMENT * emptied.num_returned / run.num_steps,
                    exact=True,
                    slots=frozenset({"allocator"}),
                    empties_at=tuple(events),
                )

    def apply(self, session: "Session", chosen: Sequence[ChosenOption]) -> None:
        """Registers optimizer hooks, or wraps the model's forward."""
        from tightfit.techniques.lifetimes.apply_empty_cache import apply_empty_cache

        apply_empty_cache(session, chosen)


def _borders(run: OptimizerProfile) -> Mapping[str, list[int]]:
    """The events of each border, one for each time that it is crossed."""
    num_events = len(run.tape.events)
    backward = events_of(run, runs_of(run.tape.operators.phase == Phase.BACKWARD))
    begins = {
        "before the forward": [begin for begin, _ in passes_of(run)],
        "after the forward": [begin for begin, _ in backward],
        "before the optimizer": [step_range.begin_event for step_range in run.step_ranges],
        "after the optimizer": [step_range.end_event for step_range in run.step_ranges],
    }
    inside = {border: [e for e in events if e < num_events] for border, events in begins.items()}
    return {border: events for border, events in inside.items() if events}
