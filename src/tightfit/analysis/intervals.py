"""Helpers of the analyses: ranges of operators, and bytes over ranges of events."""

from collections.abc import Iterable

import numpy as np

from tightfit.planner.option import Change
from tightfit.tape import Column


def runs_of(is_member: Column) -> list[tuple[int, int]]:
    """The ranges of consecutive true values: (first, one past the last)."""
    # Padded with False, so that ranges at either end have both of their edges.
    edges = np.flatnonzero(np.diff(np.r_[False, is_member, False].astype(np.int8)))
    return [(int(b), int(e)) for b, e in zip(edges[::2], edges[1::2], strict=True)]


def memory_timeline(allocated_at: Column, freed_at: Column, num_bytes: Column) -> list[tuple[int, int, int]]:
    """The memory timeline of blocks with these lifetimes: (begin event, end event, bytes) where bytes are allocated, disjoint, in order."""
    moments, index = np.unique(np.r_[allocated_at, freed_at], return_inverse=True)
    difference = np.zeros(len(moments), dtype=np.int64)
    # add.at and not +=, which would count a repeated index once: several blocks can begin or end at one event.
    np.add.at(difference, index, np.r_[num_bytes, -num_bytes].astype(np.int64))
    alive = np.cumsum(difference)
    return [
        (int(begin), int(end), int(level))
        for begin, end, level in zip(moments[:-1], moments[1:], alive[:-1], strict=True)
        if level
    ]


def changes(step_ranges: Iterable[tuple[int, int, int]], factor: float = 1.0) -> tuple[Change, ...]:
    """Changes of `factor` times the bytes of these ranges of events, without empty ones."""
    found = (Change(begin=b, end=e, num_bytes=round(factor * n)) for b, e, n in step_ranges if e > b)
    return tuple(change for change in found if change.num_bytes)
