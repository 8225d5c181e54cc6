"""The storages of a tape over time: the events that allocate and free each, and which of them an operator makes, frees or hands on.

A tape does not say which storages are inputs and outputs: they are taken to be the last large ones allocated before a range of operators and in it.
"""

from functools import cached_property

import numpy as np

from tightfit.allocator.pools import MIN_BLOCK_BYTES
from tightfit.tape import Column, EventKind, Source, Tape

# Batch and layer norm allocate their statistics after their result; whatever is this small is no input or output.
_SMALLEST_SHARE = 0.05


class StorageLifetimes:
    """When the storages of `tape` are allocated and freed. `block_bytes` are their sizes as the allocator rounds them, `freed_at` the event that frees each."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        operators, events = tape.operators, tape.events
        # The allocator's own rounding, without which predictions for many small storages come out too low.
        self.block_bytes = -(-tape.storages.num_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
        # A storage that is never freed outlives the tape.
        freed_at = np.full(len(tape.storages), len(events), dtype=np.int64)
        frees = events.kind == EventKind.FREE
        freed_at[events.storage[frees]] = np.flatnonzero(frees)
        self.freed_at = freed_at
        self.is_tensor = tape.storages.source == Source.TENSOR
        # Tables, as these are asked for each of thousands of calls.
        self._first_event = np.searchsorted(events.operator, np.arange(len(operators) + 2), side="left")
        self._in_order_of_operators = np.argsort(tape.storages.operator, kind="stable")
        self._operators_in_order = tape.storages.operator[self._in_order_of_operators].astype(np.int64)

    @cached_property
    def allocated_at(self) -> Column:
        """The event that allocates each storage."""
        allocations = np.flatnonzero(self.tape.events.kind == EventKind.ALLOCATE)
        at = np.zeros(len(self.tape.storages), dtype=np.int64)
        at[self.tape.events.storage[allocations]] = allocations
        return at

    @cached_property
    def cached_until(self) -> Column:
        """The event until which autocast's cache holds each storage, 0 for those that it does not."""
        until = np.zeros(len(self.tape.storages), dtype=np.int64)
        until[self.casts[:, 0]] = self.tape.casts.end[self.casts[:, 1]]
        return until

    @cached_property
    def casts(self) -> Column:
        """The storages that autocast's cache holds, each with its row of `Tape.casts`, shape (casts, 2)."""
        found = [(self.first_result(n), row) for row, n in enumerate(self.tape.casts.operator.tolist())]
        return np.array([each for each in found if each[0] >= 0], dtype=np.int64).reshape(-1, 2)

    def event_of(self, operator: Column | int) -> Column:
        """The index of the first event of an operator; for the number of operators, the number of events before the end of the tape."""
        return self._first_event[operator + 1]

    def made_in(self, begin: int, end: int) -> Column:
        """The storages that the operators `[begin, end)` allocate, in the order of their allocation."""
        low, high = self._operators_in_order.searchsorted((begin, end))
        return np.sort(self._in_order_of_operators[low:high])

    def freed_in(self, begin: int, end: int) -> Column:
        """The storages that the events `[begin, end)` free, in the order of their allocation."""
        events = self.tape.events
        return np.sort(events.storage[begin:end][events.kind[begin:end] == EventKind.FREE])

    def first_result(self, operator: int) -> int:
        """The storage of the first result of an operator that has made some: results are allocated in order, after what is freed again inside."""
        made = self.made_in(operator, operator + 1)
        made = made[self.is_tensor[made]]
        lasting = made[self.freed_at[made] >= self.event_of(operator + 1)]
        return int(lasting[0]) if len(lasting) else -1

    def output_of(self, begin: int, end: int) -> int:
        """The storage that the operators `[begin, end)` hand to the next one; -1 if nothing of theirs is left."""
        made = self.made_in(begin, end)
        return self.last_large(made[self.is_tensor[made] & (self.freed_at[made] >= self.event_of(end))])

    def bytes_of(self, storages: Column) -> int:
        """The bytes of these storages, rounded as the allocator does."""
        return int(self.block_bytes[storages].sum())

    def last_large(self, storages: Column) -> int:
        """The first large storage of the last operator that has one: max pooling allocates its int64 indices, which are larger, after its result."""
        sizes = self.block_bytes[storages]
        large = storages[sizes >= _SMALLEST_SHARE * sizes.max(initial=0)]
        if not len(large):
            return -1
        allocated_at = self.tape.storages.operator[large]
        return int(large[allocated_at == allocated_at.max()][0])
