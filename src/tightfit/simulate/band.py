"""How far the reserved peak of a tape can be from the likely one, by replaying the tape with what is not known otherwise.

Two causes. *Library workspaces*: the tape gives a range for each; it is replayed with all of them at their least, and at their most.
*Order*: whether a freed block serves the next request depends on which of two neighbouring events came first, and a kernel's own order
inside an operator is not always known. So the tape is replayed with some frees one event later, and, the other way, the last large segment
that was mapped on the way to the peak although as much lay free in pieces is counted as doubtful: with another order it need not have been
mapped. Segments of the small pool, which are 2 MiB each and come at any time, do not hide it.
"""

from collections.abc import Iterator

import numpy as np

from tightfit.allocator.caching import OutOfDeviceMemory
from tightfit.allocator.pools import SMALL_SEGMENT_BYTES
from tightfit.allocator.settings import AllocatorSettings
from tightfit.simulate.estimate import Band
from tightfit.simulate.timeline_bytes import Levels, replay_levels
from tightfit.tape import Column, EventKind, Tape

NUM_ORDERS = 4
SHARE_OF_LATE_FREES = 0.3
# Each replay costs about 3 us an event; a tape of a million events is replayed fewer times.
MAX_EVENTS_REPLAYED = 1_000_000


def reserved_band(tape: Tape, settings: AllocatorSettings, levels: Levels, *, room_bytes: int) -> Iterator[Band]:
    """The doubts about the reserved peak of `levels`, the likely replay. A run never reserves more than `room_bytes` and still fits."""
    likely = int(levels.reserved.max(initial=0))
    limit = room_bytes if likely <= room_bytes else None
    storages = tape.storages
    if (storages.low_bytes != storages.high_bytes).any():
        ends = [_peak(tape, settings, limit, num_bytes=c) for c in (storages.low_bytes, storages.high_bytes)]
        yield _band("choice of library workspaces", likely, ends)
    if len(tape.events):
        num_orders = max(1, min(NUM_ORDERS, MAX_EVENTS_REPLAYED // len(tape.events)))
        orders = [_peak(tape, settings, limit, order=_order(tape, seed)) for seed in range(num_orders)]
        yield _band("order of frees and requests", likely, [likely - doubtful_bytes(levels), *orders])


def doubtful_bytes(levels: Levels) -> int:
    """The last large segment that was mapped, on the way to the reserved peak, although as many bytes lay free in pieces; 0 if there is none."""
    reserved, allocated = levels.reserved, levels.allocated
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
        levels = replay_levels(tape, settings, num_bytes=num_bytes, order=order, capacity_bytes=limit)
    except OutOfDeviceMemory:
        levels = replay_levels(tape, settings, num_bytes=num_bytes, order=order)
    return int(levels.reserved.max(initial=0))


def _order(tape: Tape, seed: int) -> Column:
    """The events, some frees behind the event that follows them."""
    frees = tape.events.kind == EventKind.FREE
    late = frees & (np.random.default_rng(seed).random(len(frees)) < SHARE_OF_LATE_FREES)
    return np.argsort(np.arange(len(frees)) + 1.5 * late, kind="stable")
