"""The memory timeline of a run, downsampled for a page without losing a peak.

The events are divided into buckets. Each keeps its time step of most allocated bytes, with the exact bytes of every category then, the minimum of
allocated and the maximum of reserved bytes. Buckets differ in width: around the peak of the run and of each step they hold one event each, so that
zooming shows single events, the step with the peak is divided finely, and the rest evenly. Short runs are kept whole.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from tightfit.simulate.history import CATEGORIES, UNKNOWN, History
from tightfit.tape import Column


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Detail:
    """The resolution, as numbers of buckets: over the whole run, over the step with the peak, and single events around peaks."""

    # Chosen so that the page of a long run stays around half a megabyte.
    num_even: int = 10_000
    num_in_step: int = 5000
    num_around_peak: int = 3000
    num_around_step_peaks: int = 200
    num_steps: int = 20

    @property
    def num_kept_whole(self) -> int:
        """Runs of at most this many events are kept whole."""
        return self.num_even + self.num_in_step + self.num_around_peak + self.num_around_step_peaks * self.num_steps

    def halved(self) -> "Detail":
        """Half the resolution everywhere."""
        return Detail(**{f.name: max(1, getattr(self, f.name) // 2) for f in dataclasses.fields(self)})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Buckets `[edges[i], edges[i + 1])` of events, as columns of their number (`edges` has one more).

    `at` is the first event of the bucket after which most is allocated, and `by_category[c]` the bytes of each category then, which
    add up to the allocated bytes. `low` is the minimum of allocated and `reserved` the maximum of reserved bytes in the bucket. `block` is the
    block that was allocated at `at`, -1 where none was.
    """

    edges: Column
    at: Column
    low: Column
    reserved: Column
    by_category: tuple[Column, ...]
    block: Column


def timeline(history: History, detail: Detail) -> Timeline:
    """The buckets of `history`; none where it has no events."""
    edges = _edges(history, detail)
    if not history.num_events:
        empty = np.zeros(0, dtype=np.int64)
        return Timeline(
            edges=edges, at=empty, low=empty, reserved=empty, by_category=(empty,) * len(CATEGORIES), block=empty
        )
    starts = edges[:-1]
    at = _first_highest(history.allocated, edges)
    # Exact at the bucket's own peak; categories at other events of the bucket are not kept.
    by_category = list(category_timelines(history, at))
    # Bytes that no block explains, such as blocks that a recording began too late to see, have no known category.
    by_category[UNKNOWN] = by_category[UNKNOWN] + history.allocated[at] - sum(by_category)
    return Timeline(
        edges=edges,
        at=at,
        low=np.minimum.reduceat(history.allocated, starts),
        reserved=np.maximum.reduceat(history.reserved, starts),
        by_category=tuple(by_category),
        block=_born_at(history, at),
    )


def category_timelines(history: History, events: Column) -> Iterator[Column]:
    """The bytes of each category, in the order of `CATEGORIES`, just after each of `events`."""
    blocks, num_events = history.blocks, history.num_events
    for category in range(len(CATEGORIES)):
        mine = blocks.category == category
        allocated_at, freed_at, num_bytes = blocks.allocated_at[mine], blocks.freed_at[mine], blocks.block_bytes[mine]
        # Blocks from before the first event (born -1) go to slot 0, those that are never freed to the last slot, which no event reads.
        # bincount sums in float64, which is exact for integers up to 2**53 bytes.
        change = (
            np.bincount(allocated_at + 1, num_bytes, num_events + 1)
            - np.bincount(np.minimum(freed_at, num_events) + 1, num_bytes, num_events + 2)[: num_events + 1]
        )
        yield np.cumsum(change)[events + 1].astype(np.int64)


def _edges(history: History, detail: Detail) -> Column:
    num_events, peak = history.num_events, history.peak_event
    if num_events <= detail.num_kept_whole:
        return np.arange(num_events + 1, dtype=np.int64)
    pieces = [_even(0, num_events, detail.num_even), _around(peak, detail.num_around_peak, num_events)]
    for span in history.spans:
        # With more spans than that, borders of steps alone would use up the buckets.
        if len(history.spans) <= detail.num_even // 16:
            pieces.append(np.array([span.begin, span.end], dtype=np.int64))
        if span.begin <= peak < span.end:
            pieces.append(_even(span.begin, span.end, detail.num_in_step))
    for peak_of_step in _step_peaks(history, detail.num_steps):
        pieces.append(_around(peak_of_step, detail.num_around_step_peaks, num_events))
    edges = np.unique(np.concatenate(pieces))
    return edges[(edges >= 0) & (edges <= num_events)]


def _even(begin: int, end: int, number: int) -> Column:
    return np.linspace(begin, end, min(number, end - begin) + 1).astype(np.int64)


def _around(event: int, number: int, num_events: int) -> Column:
    return np.arange(max(0, event - number // 2), min(num_events, event + number // 2) + 1, dtype=np.int64)


def _step_peaks(history: History, most: int) -> list[int]:
    """The highest events of the spans with the highest peaks."""
    peaks = [
        span.begin + int(history.allocated[span.begin : span.end].argmax())
        for span in history.spans
        if len(history.allocated[span.begin : span.end])
    ]
    return sorted(peaks, key=lambda event: -history.allocated[event])[:most]


def _first_highest(values: Column, edges: Column) -> Column:
    """For each bucket the first index of its highest value."""
    highest = np.repeat(np.maximum.reduceat(values, edges[:-1]), np.diff(edges))
    # A maximum can occur several times in a bucket; the first one is where the peak was reached.
    candidates = np.flatnonzero(values == highest)
    # A bucket includes its left edge and not its right one.
    bucket = np.searchsorted(edges, candidates, side="right") - 1
    return candidates[np.unique(bucket, return_index=True)[1]]


def _born_at(history: History, events: Column) -> Column:
    allocated_at = history.blocks.allocated_at
    if not len(allocated_at):
        return np.full(len(events), -1, dtype=np.int64)
    block = np.minimum(np.searchsorted(allocated_at, events), len(allocated_at) - 1)
    return np.where(allocated_at[block] == events, block, -1)
