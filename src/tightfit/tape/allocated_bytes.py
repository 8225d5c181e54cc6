"""Bytes that a tape has allocated over time."""

import numpy as np

from tightfit.tape.columns import Column, EventKind, Tape


def allocated_bytes(tape: Tape, chosen: Column | None = None) -> Column:
    """Bytes that are allocated before the first event and after each, of the `chosen` storages (a mask) or of all: one more than there are events."""
    kind, storage = tape.events.kind, tape.events.storage
    size = tape.storages.num_bytes if chosen is None else np.where(chosen, tape.storages.num_bytes, 0)
    # Events that concern no storage are neither.
    change = np.where(kind == EventKind.ALLOCATE, size[storage], np.where(kind == EventKind.FREE, -size[storage], 0))
    return np.concatenate(([0], np.cumsum(change)))
