"""The category of each block of a run that tightfit recorded itself.

Parameters, gradients and optimizer states were named by their addresses while they were allocated. The rest follows from lifetimes: what a
forward pass saves for the backward pass is an activation, what was allocated before the forward pass an input, and all else that is freed a
temporary. A block that outlives its step by more than a whole one is none of these; with the size of torch's cuBLAS workspace it is that
workspace, and if each step's forward pass leaves one of its size it is an activation that is kept, as by a graph that nobody lets go.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from tightfit.devices.cublas_workspaces import DEFAULT_CUBLAS_BYTES
from tightfit.recordings.notes import PlacedNote
from tightfit.runtime.recorded import BACKWARD, FORWARD, OTHER
from tightfit.simulate.history import CATEGORIES, UNKNOWN
from tightfit.tape import Category, Column

# The state of a block whose category is undecided: allocated before the forward pass of its step ("early"), in it or after it
# ("forward"), or in another phase ("inside"); or still allocated when a backward pass began ("waiting").
_State = Literal["early", "forward", "inside", "waiting"]

_AT_DEATH: dict[_State, Category] = {
    "early": Category.TEMPORARIES,
    "forward": Category.TEMPORARIES,
    "inside": Category.TEMPORARIES,
    "waiting": Category.ACTIVATIONS,
}
_AT_THE_END: dict[_State, Category] = {
    "early": Category.INPUTS,
    "forward": Category.ACTIVATIONS,
    "inside": Category.TEMPORARIES,
    "waiting": Category.ACTIVATIONS,
}


def classify(
    trace: Sequence[Mapping[str, Any]],
    start_addresses: Sequence[int],
    notes: Sequence[PlacedNote],
    step_ends: Sequence[int],
) -> tuple[Column, Column, Column, Column]:
    """The events and categories of the allocations that are known, then the addresses and categories of the known blocks of the start.

    `start_addresses` are the blocks allocated before the first event, `step_ends` the events before which a step was over.
    """
    found = _Classifier(start_addresses)
    found.run(trace, notes, step_ends)
    allocated_at = sorted((block, category) for block, category in found.category.items() if block >= 0)
    start = sorted((start_addresses[-1 - block], c) for block, c in found.category.items() if block < 0)
    allocated_at, start = ([row for row in rows if row[1] != UNKNOWN] for rows in (allocated_at, start))
    events, addresses = (np.array(rows, dtype=np.int64).reshape(-1, 2).T for rows in (allocated_at, start))
    return events[0], events[1], addresses[0], addresses[1]


class _Classifier:
    """Goes through a trace once. A block is identified by the event that allocated it; those of the start count down from -1."""

    def __init__(self, start_addresses: Sequence[int]) -> None:
        self.category: dict[int, int] = {}
        self._alive = {address: -1 - at for at, address in enumerate(start_addresses)}
        self._named: set[int] = set()
        self._states: dict[int, _State] = {}
        self._births: dict[int, tuple[int, int]] = {}  # of the undecided: the number of the step, and the bytes
        self._phase = OTHER
        self._has_seen_forward = False
        self._num_steps = 0

    def run(self, trace: Sequence[Mapping[str, Any]], notes: Sequence[PlacedNote], step_ends: Sequence[int]) -> None:
        """Goes through the events and decides the category of every block that it can."""
        ends = set(step_ends)
        for event, entry, due in _with_notes(trace, notes):
            for note in due:
                self._heed(note)
            # After the notes of this event: the optimizer's states are named by the note that ends its step.
            if event in ends:
                self._end_step()
            if entry.get("action") == "alloc":
                self._born(event, entry)
            elif entry.get("action") == "free_requested":
                self._died(entry["addr"])
        for block, state in self._states.items():
            self.category[block] = _AT_THE_END[state]

    def _heed(self, placed: PlacedNote) -> None:
        for category, addresses in placed.held:
            for address in addresses:
                self._name(address, CATEGORIES.index(category))
        if placed.note.kind == "phase":
            self._change_phase(placed.note.text)

    def _name(self, address: int, category: int) -> None:
        block = self._alive.get(address)
        if block is not None and block not in self._named:
            self._named.add(block)
            self._states.pop(block, None)
            self.category[block] = category

    def _change_phase(self, phase: str) -> None:
        if phase == FORWARD:
            self._has_seen_forward = True
            for block in self._in_state("early"):
                del self._states[block]
                self.category[block] = Category.INPUTS
        elif phase == BACKWARD:
            # A backward pass without a forward pass before it in this step: its activations were made outside of any module call.
            for block in self._in_state("forward") + ([] if self._has_seen_forward else self._in_state("early")):
                self._states[block] = "waiting"
        self._phase = phase

    def _in_state(self, state: _State) -> list[int]:
        return [block for block, found in self._states.items() if found == state]

    def _end_step(self) -> None:
        self._num_steps += 1
        self._has_seen_forward = False
        waiting = {self._births[block] for block in self._in_state("waiting")}
        for block in list(self._states):
            step, num_bytes = self._births[block]
            if step <= self._num_steps - 2:
                self.category[block] = self._outlived(block, is_each_step=(step + 1, num_bytes) in waiting)
                del self._states[block]

    def _outlived(self, block: int, *, is_each_step: bool) -> int:
        """A block that has outlived a whole step: a cache, a running statistic of the script, a library's workspace, or what a graph holds that is kept."""
        if self._births[block][1] in DEFAULT_CUBLAS_BYTES:
            return Category.WORKSPACE
        return Category.ACTIVATIONS if is_each_step and self._states[block] == "waiting" else UNKNOWN

    def _born(self, event: int, entry: Mapping[str, Any]) -> None:
        self._alive[entry["addr"]] = event
        self._births[event] = (self._num_steps, entry["size"])
        if self._phase == OTHER:
            self._states[event] = "forward" if self._has_seen_forward else "early"
        else:
            self._states[event] = "forward" if self._phase == FORWARD else "inside"

    def _died(self, address: int) -> None:
        block = self._alive.pop(address, None)
        if block in self._states:
            self.category[block] = _AT_DEATH[self._states.pop(block)]


def _with_notes(
    trace: Sequence[Mapping[str, Any]], notes: Sequence[PlacedNote]
) -> Iterator[tuple[int, Mapping[str, Any], list[PlacedNote]]]:
    """Each event with the notes that precede it, and at the end the notes after the last event, with an empty event."""
    at = 0
    for event, entry in enumerate((*trace, {})):
        begin = at
        while at < len(notes) and (notes[at].event <= event or event == len(trace)):
            at += 1
        yield event, entry, list(notes[begin:at])
