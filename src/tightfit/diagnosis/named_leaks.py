"""The leaks of a run that was traced, with their holders; and reserved memory that grows from step to step while allocated memory does not.

Growth of sites is that of `tightfit.diagnosis.growth`; where there are steps enough, it also has to stand the test that `tightfit.leaks` makes.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping

from tightfit.diagnosis.growth import GrowingSite, growing_sites
from tightfit.diagnosis.step_spans import StepSpan
from tightfit.recordings.frames import AllocationSite
from tightfit.runtime.leaks.found_leaks import Leak, LeakHolder, LeakSite, family_of, fragmentation, is_bounded
from tightfit.runtime.leaks.robust_growth import MIN_STEPS, NUM_WARM_UP, growth_per_step
from tightfit.simulate.history import History
from tightfit.units import MIB

_MIN_RESERVED = MIB
_MAX_SHARE_ALLOCATED = 0.25
_MAX_SHARE_WAITING = 0.5


def named_leaks(
    history: History,
    places: tuple[AllocationSite, ...],
    steps: tuple[StepSpan, ...],
    holders: Mapping[int, LeakHolder],
    waiting_at: Mapping[int, int],
) -> tuple[Leak, ...]:
    """The leaks whose holder is known, fastest first; `holders` by block, `waiting_at` the bytes that wait for other streams by event."""
    groups: dict[tuple[str, str], list[tuple[GrowingSite, LeakHolder]]] = defaultdict(list)
    for site in growing_sites(history, places, steps):
        votes = Counter(holders[block] for block in site.blocks.tolist() if block in holders)
        if votes and (len(steps) < MIN_STEPS or growth_per_step([0, *site.bytes_at_ends])):
            holder = votes.most_common(1)[0][0]
            if not is_bounded(holder):
                groups[holder.cause, family_of(holder.path)].append((site, holder))
    found = [
        Leak(
            holder=members[0][1],
            sites=tuple(_site(site.place, site.bytes_per_step) for site, _ in members),
            bytes_per_step=sum(site.bytes_per_step for site, _ in members),
        )
        for members in groups.values()
    ]
    return tuple(
        sorted((*found, *_fragmentation(history, places, steps, waiting_at)), key=lambda leak: -leak.bytes_per_step)
    )


def _site(place: AllocationSite, bytes_per_step: int) -> LeakSite:
    return LeakSite(where=place.name, function=place.function, callers=place.callers, bytes_per_step=bytes_per_step)


def _fragmentation(
    history: History,
    places: tuple[AllocationSite, ...],
    steps: tuple[StepSpan, ...],
    waiting_at: Mapping[int, int],
) -> tuple[Leak, ...]:
    reserved = growth_per_step([int(history.reserved[step.end - 1]) for step in steps])
    # What waits for another stream is free as soon as that one is done, which a simulation cannot know.
    if growth_per_step([waiting_at.get(step.end - 1, 0) for step in steps]) > _MAX_SHARE_WAITING * reserved:
        return ()
    allocated = growth_per_step([step.end_allocated_bytes for step in steps])
    if reserved < _MIN_RESERVED or allocated > _MAX_SHARE_ALLOCATED * reserved:
        return ()
    # The sites whose requests found no free block after the steps of warm-up.
    rises: Counter[int] = Counter()
    begin = steps[NUM_WARM_UP].begin
    for block, event in enumerate(history.blocks.allocated_at.tolist()):
        if event >= max(1, begin) and history.reserved[event] > history.reserved[event - 1]:
            rises[int(history.blocks.stack[block])] += int(history.reserved[event] - history.reserved[event - 1])
    share = reserved / max(1, sum(rises.values()))
    sites = tuple(_site(places[stack], round(share * num_bytes)) for stack, num_bytes in rises.most_common(4))
    return (fragmentation(sites, round(reserved)),)
