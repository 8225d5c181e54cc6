"""Makes the events of one device whole: halves of frees that a recorder left out are put back, and a history that contradicts itself is refused.

torch's recorder leaves out the kinds of events that `skip_actions` names. Replayed as they are, blocks that are never freed add up to
a peak that no GPU has had.
"""

from collections.abc import Mapping

import numpy as np

from tightfit.recordings.events import Action, Malformed
from tightfit.tape import Column

Columns = dict[str, Column]


def completed(
    columns: Columns, free_bytes_at_oom: Mapping[int, int], addresses_at_end: frozenset[int] | None
) -> tuple[Columns, Mapping[int, int]]:
    """The events with both halves of each free, and the failures by their new numbers.

    `addresses_at_end` are those of the blocks that are allocated in the snapshot, or None if it has no segments.

    Raises:
        Malformed: the events contradict each other, or the blocks at the end.
    """
    action = columns["action"]
    has_requests, has_completions = ((action == kind).any() for kind in (Action.FREE_REQUESTED, Action.FREE_COMPLETED))
    # That all blocks wait for another stream, or waited before the recording, is rare, but no contradiction.
    if has_completions and not has_requests and _has_whole_life(columns):
        columns, free_bytes_at_oom = _with_both_halves(columns, free_bytes_at_oom, Action.FREE_COMPLETED)
    elif has_requests and not has_completions and _contradiction(columns) is not None:
        columns, free_bytes_at_oom = _with_both_halves(columns, free_bytes_at_oom, Action.FREE_REQUESTED)
    elif not has_requests and not has_completions and addresses_at_end is not None:
        gone = set(columns["address"][action == Action.ALLOC].tolist()) - addresses_at_end
        if gone:
            raise Malformed(f"its frees are missing: the block at {min(gone):#x} is gone at the end (skip_actions?)")
    contradiction = _contradiction(columns)
    if contradiction is not None:
        raise Malformed(f"its events contradict each other: {contradiction}; some are missing or out of order")
    return columns, free_bytes_at_oom


def _has_whole_life(columns: Columns) -> bool:
    """Whether a block was allocated and freed among these events."""
    _, action, address = _by_address(columns)
    is_life = (action[:-1] == Action.ALLOC) & (action[1:] == Action.FREE_COMPLETED) & (np.diff(address) == 0)
    return bool(is_life.any())


def _by_address(columns: Columns) -> tuple[Column, Column, Column]:
    """The allocations and completed frees by address, and by time for each: the number of the event, its action and address."""
    found = np.flatnonzero((columns["action"] == Action.ALLOC) | (columns["action"] == Action.FREE_COMPLETED))
    found = found[np.argsort(columns["address"][found], kind="stable")]
    return found, columns["action"][found], columns["address"][found]


def _contradiction(columns: Columns) -> str | None:
    """The first allocation where a block is allocated already, or free of one that is free; at one address they take turns."""
    events, action, address = _by_address(columns)
    is_second = np.append(False, (np.diff(address) == 0) & (np.diff(action) == 0))
    if not is_second.any():
        return None
    first = int(np.flatnonzero(is_second)[events[is_second].argmin()])
    what, state = ("an allocation", "allocated") if action[first] == Action.ALLOC else ("a free", "free")
    return f"event {int(events[first]):,} is {what} of a block at {int(address[first]):#x} that is {state} then"


def _with_both_halves(
    columns: Columns, free_bytes_at_oom: Mapping[int, int], there: Action
) -> tuple[Columns, Mapping[int, int]]:
    """The events with each free twice: as it was asked for, and as it was done."""
    is_free = columns["action"] == there
    at = np.repeat(np.arange(len(is_free)), np.where(is_free, 2, 1))
    both = {name: column[at] for name, column in columns.items()}
    begins = np.flatnonzero(is_free) + np.arange(int(is_free.sum()))
    both["action"][begins] = Action.FREE_REQUESTED
    both["action"][begins + 1] = Action.FREE_COMPLETED
    shift = np.cumsum(is_free)
    return both, {event + int(shift[event]): free for event, free in free_bytes_at_oom.items()}
