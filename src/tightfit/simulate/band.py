"""The uncertainty of the reserved peak, from replays of the tape under other assumptions.

Two causes. *Library workspaces*: the tape gives a range for each; it is replayed with all of them at their lower and at their upper ends.
*Allocation order*: whether a freed block serves the next request depends on which of two neighbouring events came first, and the order inside
an operator is not always known. So the tape is replayed with some frees one event later. In the other direction, the last large segment that was
allocated before the peak although as many bytes were free in pieces is counted as doubtful: with another order it might not have been needed.
Segments of the small pool, which are 2 MiB each and appear at any time, do not hide it.
"""

from collections.abc import Iterator

import numpy as np

from tightfit.allocator.caching import OutOfDeviceMemory
from tightfit.allocator.pools import SMALL_SEGMENT_BYTES
from tightfit.allocator.settings import AllocatorSettings
from tightfit.simulate.estimate import Band
from tightfit.simulate.timeline_bytes import MemoryTimeline, replay_timeline
from tightfit.tape import Column, EventKind, Tape

# Chosen on 39 published runs on two RTX cards (docs/log.md, "Width and coverage of the band"): 92 % of the measured peaks lie in
# the band with four orders and 30 % late frees; 3 % late frees are narrower but lose a run, five orders add nothing.
NUM_ORDERS = 4
SHARE_OF_LATE_FREES = 0.3
# Each replay costs about 3 us an event; a tape of a million events is replayed fewer times.
MAX_EVENTS_REPLAYED = 1_000_000


def reserved_band(
    tape: Tape, settings: AllocatorSettings, timeline: MemoryTimeline, *, room_bytes: int
) -> Iterator[Band]:
    """The uncertainties of the reserved peak of `timeline`, the likely replay. Replays that reserve more than `room_bytes` do not fit."""
    # Where even the likely replay does not fit, a limit would end the other replays before they reach their peaks.
    likely = int(timeline.reserved.max(initial=0))
    limit = room_bytes if likely <= room_bytes else None
    storages = tape.storages
    if (storages.low_bytes != storages.high_bytes).any():
        ends = [_peak(tape, settings, limit, num_bytes=c) for c in (storages.low_bytes, storages.high_bytes)]
        yield _band("choice of library workspaces", likely, ends)
    if len(tape.events):
        num_orders = max(1, min(NUM_ORDERS, MAX_EVENTS_REPLAYED // len(tape.events)))
        orders = [_peak(tape, settings, limit, order=_order(tape, seed)) for seed in range(num_orders)]
        yield _band("allocation order", likely, [likely - doubtful_bytes(timeline), *orders])


def doubtful_bytes(timeline: MemoryTimeline) -> int:
    """The last large segment that was allocated before the reserved peak although as many bytes were free in pieces; 0 if there is none."""
    reserved, allocated = timeline.reserved, timeline.allocated
    climb = reserved[: int(reserved.argmax()) + 1] if len(reserved) else reserved
    mapped = np.diff(climb)
    free = climb[:-1] - allocated[: len(mapped)]
    doubtful = mapped[(mapped > SMALL_SEGMENT_BYTES) & (mapped <= free)]
    return int(doubtful[-1]) if len(doubtful) else 0


def _band(cause: str, likely: int, peaks: list[int]) -> Band:
    return Band(cause=cause, less_bytes=max(0, likely - min(peaks)), more_bytes=max(0, max(peaks) - likely))


def _peak(
    tape: Tape,
    settings: AllocatorSettings,
    limit: int | None,
    *,
    num_bytes: Column | None = None,
    order: Column | None = None,
) -> int:
    try:
        timeline = replay_timeline(tape, settings, num_bytes=num_bytes, order=order, capacity_bytes=limit)
    # With another order it may not fit any more; how far it exceeds the limit is then the upper end.
    except OutOfDeviceMemory:
        timeline = replay_timeline(tape, settings, num_bytes=num_bytes, order=order)
    return int(timeline.reserved.max(initial=0))


def _order(tape: Tape, seed: int) -> Column:
    """A permutation of the events that moves some frees behind the event that follows them."""
    frees = tape.events.kind == EventKind.FREE
    late = frees & (np.random.default_rng(seed).random(len(frees)) < SHARE_OF_LATE_FREES)
    # Adding 1.5 puts an event between its next and its next but one.
    return np.argsort(np.arange(len(frees)) + 1.5 * late, kind="stable")
