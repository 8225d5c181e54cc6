"""What one micro-batch has done: the rows of its call and of its backward pass, what it has returned, and what it has kept."""

import dataclasses

from tightfit.capture.observe.recorder import Recorder
from tightfit.capture.steps.micro_batches.answered_call import Layout, Returned
from tightfit.capture.steps.micro_batches.repeated_rows import RepeatedRows, TapePlace, Whose, rows_between
from tightfit.tape import EventKind

Kept = tuple[bool, int]
"""A storage that outlives a micro-batch: whether it is one of the forward pass, and its number there or in the backward pass."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One micro-batch, comparable with another one. `gradients` are those that the backward pass has begun with, of the tensors that were returned with a
    node, by their layouts. `values` are those of its arguments, by their numbers, that the host has read something of; `casts` the storages of weights that autocast has kept until its context ended.
    """

    forward: RepeatedRows
    backward: RepeatedRows
    returned: Returned
    gradients: tuple[Layout | None, ...]
    values: tuple[tuple[int, bytes], ...]
    casts: frozenset[int]

    @property
    def kept(self) -> set[Kept]:
        """What the graph keeps until it goes, and has not returned."""
        returned = {tensor.storage for tensor in self.returned.tensors()}
        of_forward = self.forward.left() - self.backward.freed(Whose.FORWARD) - returned - self.casts
        return {(True, number) for number in of_forward} | {(False, number) for number in self.backward.left()}

    @property
    def ends_with(self) -> set[int]:
        """The storages of returned tensors that the backward pass has freed."""
        return {tensor.storage for tensor in self.returned.tensors()} & self.backward.freed(Whose.FORWARD)

    @property
    def between(self) -> set[int]:
        """The storages, counted from the first of the backward pass, that it has freed and the program had made before it."""
        return {number for number in self.backward.freed(Whose.OWN) if number < 0}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlaces:
    """Where a call begins and ends on the tape, and where its part of the backward pass does."""

    begin: TapePlace
    end: TapePlace
    backward: TapePlace
    end_of_backward: TapePlace


def observed(
    recorder: Recorder,
    at: BatchPlaces,
    returned: Returned,
    given: tuple[int, ...],
    values: tuple[tuple[int, bytes], ...],
    gradients: tuple[Layout | None, ...],
) -> MicroBatch | None:
    """What a micro-batch has done, or None where it is not to be repeated. `given` are the storages of its arguments, -1 for what is not on the card."""
    forward = rows_between(recorder, at.begin, at.end)
    numbers = {storage: number for number, storage in enumerate(given)}
    storages = (at.begin.storages, at.end.storages)
    backward = rows_between(recorder, at.backward, at.end_of_backward, storages, numbers)
    if forward is None or backward is None:
        return None
    kinds, freed = recorder.events["kind"], recorder.events["storage"]
    between = {
        freed[n] - at.begin.storages for n in range(at.end.events, at.backward.events) if kinds[n] == EventKind.FREE
    }
    casts = (between & forward.left()) - {tensor.storage for tensor in returned.tensors()}
    return MicroBatch(
        forward=forward,
        backward=backward,
        returned=returned,
        gradients=gradients,
        values=values,
        casts=frozenset(casts),
    )


def order_of_frees(recorder: Recorder, of: MicroBatch, at: BatchPlaces) -> tuple[Kept, ...] | None:
    """In which order the storages went that a micro-batch has kept; None if some are there."""
    waiting = {
        number + (at.begin.storages if is_forward else at.backward.storages): (is_forward, number)
        for is_forward, number in of.kept
    }
    events, order = recorder.events, []
    for event in range(at.end_of_backward.events, len(events["kind"])):
        if not waiting:
            break
        if (
            events["kind"][event] == EventKind.FREE
            and (kept := waiting.pop(events["storage"][event], None)) is not None
        ):
            order.append(kept)
    return None if waiting else tuple(order)
