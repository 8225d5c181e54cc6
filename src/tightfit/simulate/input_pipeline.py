"""What the input pipeline costs per step: loading its batches on the host, and their copies to the card where the step waits for them.

Loading is timed while the program is traced, on the machine that traces it, so its seconds are that machine's. The step is simulated with loading as work of the host at its
beginning (in the main process), or beside it (in workers), and with copies that the host waits for as copies from pinned memory that it does not.
"""

import dataclasses
import itertools
from typing import Any

import numpy as np

from tightfit.cost.steps import step_operators
from tightfit.devices.calibration import Calibration
from tightfit.devices.device import Device
from tightfit.simulate.step_work import PricedTape, priced
from tightfit.simulate.timeline import seconds_of_steps
from tightfit.tape import Column, CopyDirection, Phase, Tape, WaitKind
from tightfit.tape.loader_use import LoaderUse
from tightfit.units import KIB


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoaderCost:
    """One loader in a step: `batches` of its batches, `load_seconds` to read and collate them in one process, of `batch_bytes` each, 0 where several loaders
    feed a step."""

    use: LoaderUse
    batches: float
    load_seconds: float
    batch_bytes: int

    @property
    def seconds_per_step(self) -> float:
        """The least time between two steps that its processes can keep up with."""
        return self.load_seconds / max(1, self.use.num_workers)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InputPipeline:
    """Of the last step that has the copies of a batch: `step_seconds` as it is estimated, without loading; with loading on this machine (`with_loading_seconds`); and without waiting for copies
    (`async_seconds`), which `copy_line` makes and of which `num_pageable` are from memory that is not pinned.
    """

    loaders: tuple[LoaderCost, ...]
    step_seconds: float
    with_loading_seconds: float
    async_seconds: float
    copied_bytes: int
    copy_line: str
    num_pageable: int

    def to_json(self) -> dict[str, Any]:
        """The object of it in `tightfit estimate --json`."""
        return {
            "loaders": [
                {
                    "where": cost.use.line,
                    "num_workers": cost.use.num_workers,
                    "pin_memory": cost.use.pins_memory,
                    "prefetch_factor": cost.use.prefetch_factor,
                    "persistent_workers": cost.use.is_persistent,
                    "batches_per_step": cost.batches,
                    "load_seconds_per_step": cost.load_seconds,
                    "batch_bytes": cost.batch_bytes,
                }
                for cost in self.loaders
            ],
            "seconds_per_step_with_loading": self.with_loading_seconds,
            "seconds_per_step_without_waiting_for_copies": self.async_seconds,
            "waits_for_bytes_per_step": self.copied_bytes,
        }


def input_pipeline(prices: PricedTape, device: Device, calibration: Calibration | None = None) -> InputPipeline | None:
    """The costs of a step, the last one where it has the copies of a batch, of a tape that is priced on `device`; None where it has no step, or nothing that a step takes from outside of the card."""
    tape = prices.tape
    ranges = step_operators(tape)
    if not ranges:
        return None
    step = _last_with_its_copies(tape, ranges)
    begin, end = ranges[step]
    waited = _waited_for(tape, begin, end)
    costs = tuple(cost for use in tape.loaders if (cost := _cost(tape, use, ranges, step)) is not None)
    if not costs and not waited.any():
        return None
    if len(costs) > 1:
        costs = tuple(dataclasses.replace(cost, batch_bytes=0) for cost in costs)
    seconds = seconds_of_steps(prices)[step]
    copies = tape.copies
    rows = np.flatnonzero(waited)
    line = (
        tape.strings[tape.operators.line[copies.operator[rows[np.argmax(copies.num_bytes[rows])]]]] if len(rows) else ""
    )
    loading = sum(cost.load_seconds for cost in costs if not cost.use.num_workers)
    beside = max((cost.seconds_per_step for cost in costs if cost.use.num_workers), default=0.0)
    with_loading = seconds_of_steps(_with_host_work(prices, begin, loading))[step] if loading else seconds
    return InputPipeline(
        loaders=costs,
        step_seconds=seconds,
        with_loading_seconds=max(with_loading, beside),
        async_seconds=seconds_of_steps(priced(_without_waiting(tape, waited), device, calibration))[step]
        if len(rows)
        else seconds,
        copied_bytes=int(copies.num_bytes[rows].sum()),
        copy_line=line,
        num_pageable=int((~copies.is_pinned[rows].astype(bool)).sum()),
    )


def loaded_examples(tape: Tape) -> int | None:
    """The examples that each step takes from the one loader that feeds steps; None where there are several, or batches differ or are not known."""
    ranges = step_operators(tape)
    if not ranges:
        return None
    feeding = [use for use in tape.loaders if _num_taken(use, *_period(tape, ranges)[:2])]
    if len(feeding) != 1 or len(feeding[0].examples) != len(feeding[0].batches):
        return None
    ends = [_end_of_work(tape, of_step) for of_step in ranges]
    periods = list(itertools.pairwise(ends)) or ranges
    use = feeding[0]
    taken = [
        tuple(num for at, num in zip(use.batches, use.examples, strict=True) if begin <= at < end)
        for begin, end in periods
    ]
    return sum(taken[0]) if len(set(taken)) == 1 and all(taken[0]) else None


def _period(tape: Tape, ranges: list[tuple[int, int]]) -> tuple[int, int, int]:
    """The operators `[begin, end)` in which steps take their batches, and how many steps' batches that is: from the last operator of one step's backward pass or optimizer to
    that of the last step. What comes behind it is the batch of a step that was not traced, or an evaluation with a loader of its own."""
    if len(ranges) == 1:
        return (*ranges[0], 1)
    return _end_of_work(tape, ranges[0]), _end_of_work(tape, ranges[-1]), len(ranges) - 1


def _end_of_work(tape: Tape, of_step: tuple[int, int]) -> int:
    """Behind the last operator of a step's backward pass or optimizer; its end if it has none."""
    begin, end = of_step
    phase = tape.operators.phase[begin:end]
    rows = np.flatnonzero((phase == Phase.BACKWARD) | (phase == Phase.OPTIMIZER))
    return begin + int(rows[-1]) + 1 if len(rows) else end


def _num_taken(use: LoaderUse, begin: int, end: int) -> int:
    """How many batches were taken in a range of operators."""
    return sum(begin <= operator < end for operator in use.batches)


def _last_with_its_copies(tape: Tape, ranges: list[tuple[int, int]]) -> int:
    """The last step after which one of the loaders that feed steps was asked again: the copies of that batch are in the step's range, those of an evaluation are not."""
    begin, end, _ = _period(tape, ranges)
    feeding = [use for use in tape.loaders if _num_taken(use, begin, end)]
    is_last = not feeding or any(_num_taken(use, *ranges[-1]) for use in feeding)
    return len(ranges) - 1 if is_last or len(ranges) == 1 else len(ranges) - 2


def _waited_for(tape: Tape, begin: int, end: int) -> Column:
    """Which copies to the card the host waits for in a step."""
    copies = tape.copies
    inside = (copies.operator >= begin) & (copies.operator < end)
    return inside & (copies.direction == CopyDirection.TO_CARD) & copies.is_blocking.astype(bool)


def _cost(tape: Tape, use: LoaderUse, ranges: list[tuple[int, int]], step: int) -> LoaderCost | None:
    """None for a loader that steps take nothing from."""
    begin, end, num_steps = _period(tape, ranges)
    taken = _num_taken(use, begin, end)
    if not taken or not use.seconds_per_batch:
        return None
    batches = taken / num_steps
    copies = tape.copies
    begin, end = ranges[step]
    inside = (copies.operator >= begin) & (copies.operator < end) & (copies.direction == CopyDirection.TO_CARD)
    num_bytes = int(copies.num_bytes[inside].sum() / batches)
    return LoaderCost(use=use, batches=batches, load_seconds=batches * use.seconds_per_batch, batch_bytes=num_bytes)


def _with_host_work(prices: PricedTape, operator: int, seconds: float) -> PricedTape:
    """With the host busy for `seconds` before `operator`."""
    waits = prices.tape.waits
    at = int(np.searchsorted(waits.operator, operator, side="right"))
    added = {
        "kind": int(WaitKind.HOST_UPDATES),
        "operator": operator,
        "stream": -1,
        "event": max(1, round(seconds / prices.update_seconds_per_byte / KIB)),
    }
    columns = {name: np.insert(column, at, added[name]) for name, column in waits.columns().items()}
    tape = dataclasses.replace(prices.tape, waits=type(waits).from_columns(columns))
    return dataclasses.replace(prices, tape=tape)


def _without_waiting(tape: Tape, waited: Column) -> Tape:
    copies = tape.copies
    changed = dataclasses.replace(
        copies,
        is_pinned=np.where(waited, True, copies.is_pinned),
        is_blocking=np.where(waited, False, copies.is_blocking),
    )
    return dataclasses.replace(tape, copies=changed)
