"""The work of one step in the order in which the host issues it: runs of kernels on one stream, copies, events, and waits of the host.

A run of kernels between two waits or copies moves the clocks of the host and of its stream by three numbers, however many kernels it has, so a step
is compiled once and then replayed at the cost of its copies and waits.
"""

import dataclasses
import enum
from collections.abc import Sequence

import numpy as np

from tightfit.cost.attention_plans import plan_seconds
from tightfit.cost.copies import copy_seconds
from tightfit.cost.efficiency import efficiency_of
from tightfit.cost.host_bandwidth import HOST_BYTES_PER_SECOND, host_bytes_per_second
from tightfit.cost.host_python import MICROSECOND, REFERENCE_SECONDS
from tightfit.cost.roofline import is_kernel, operator_seconds
from tightfit.cost.traced_collectives import traced_collective_seconds
from tightfit.devices.calibration import Calibration
from tightfit.devices.device import Device
from tightfit.devices.node import Node
from tightfit.tape import Column, SpanKind, Tape, WaitKind
from tightfit.units import KIB


class WorkKind(enum.IntEnum):
    """What one item of a step's work is. `stream` in the comments is the place among `StepWork.streams`."""

    KERNELS = 0  # stream, seconds on the host, seconds on the stream, seconds from the host's start to the last kernel's end on a free stream
    COPY = 1  # stream, seconds on the host, seconds on engine and stream, number of the engine
    BLOCKING_COPY = 2  # the same; the host waits for it
    RECORD = 3  # stream, event
    STREAM_FOR_EVENT = 4  # stream, event
    HOST_FOR_EVENT = 5  # -, event
    HOST_FOR_STREAM = 6  # stream
    HOST_FOR_DEVICE = 7
    HOST_READS = 8  # stream, -, seconds
    HOST_UPDATES = 9  # -, -, seconds
    HOST_RUNS = 10  # -, -, seconds


Item = tuple[int, int, float, float, float]

NUM_ENGINES = 3
"""One copy engine of the card in each direction, and the disk."""
# By `CopyDirection`; a disk reads and writes one after the other.
_ENGINE_OF = np.array([0, 1, 2, 2])

_KIND_OF_WAIT = np.array([WorkKind[kind.name] for kind in WaitKind])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PricedTape:
    """A tape with the seconds of each operator on the card, those to issue it from the host, those to read a value back, and those in which the host
    itself reads or writes a byte as it updates parameters. `python_factor` is how long Python of techniques takes, against where it was measured.
    """

    tape: Tape
    seconds: Column
    issue_seconds: Column
    read_seconds: float
    update_seconds_per_byte: float = 1.0 / HOST_BYTES_PER_SECOND
    python_factor: float = 1.0


def priced(
    tape: Tape,
    device: Device,
    calibration: Calibration | None = None,
    *,
    tf32_matmul: bool | None = None,
    tf32_convolution: bool | None = None,
    node: Node | None = None,
) -> PricedTape:
    """`tape` priced on `device`; the options are those of `operator_seconds`. The collectives of a distributed program are on nodes of the kind `node`, and cost nothing without one."""
    seconds = operator_seconds(tape, device, calibration, tf32_matmul=tf32_matmul, tf32_convolution=tf32_convolution)
    if node is not None and len(tape.collectives):
        seconds[tape.collectives.operator] = traced_collective_seconds(tape, node)
    efficiency = efficiency_of(device, calibration)
    python_factor = efficiency.python_seconds / REFERENCE_SECONDS
    return PricedTape(
        tape=tape,
        seconds=seconds,
        issue_seconds=is_kernel(tape) * efficiency.issue_seconds + python_factor * plan_seconds(tape, device),
        read_seconds=copy_seconds(0, device, to_card=False, calibration=calibration),
        update_seconds_per_byte=1.0 / host_bytes_per_second(calibration),
        python_factor=python_factor,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """The items of a step, in order, with the first operator of each (of a wait, the operator before it).

    `kernels` are the operators of all runs of kernels; those of the n-th run lie at `runs[n]` to `runs[n + 1]`. `streams` are the numbers of
    the streams.
    """

    items: tuple[Item, ...]
    operators: tuple[int, ...]
    streams: tuple[int, ...]
    kernels: Column
    runs: Column


def work_of(priced_tape: PricedTape, begin: int, end: int, before: tuple[int, int] | None = None) -> StepWork:
    """The work of operators `[begin, end)`. `before` are those of the step before, of which events may be waited for."""
    tape, seconds, issue = priced_tape.tape, priced_tape.seconds, priced_tape.issue_seconds
    copies, waits = tape.copies, tape.waits
    own_copies = slice(*np.searchsorted(copies.operator, (begin, end)))
    own_waits = _own(tape, begin, end)
    works = (seconds[begin:end] > 0) | (issue[begin:end] > 0)
    works[copies.operator[own_copies] - begin] = False
    kernels = np.flatnonzero(works) + begin
    stream_of = tape.operators.stream
    streams = np.unique(np.concatenate([stream_of[begin:end], waits.stream[own_waits][waits.stream[own_waits] >= 0]]))
    runs = _runs(kernels, stream_of[kernels], copies.operator[own_copies], waits.operator[own_waits])
    first, copied = kernels[runs[:-1]], copies.operator[own_copies]
    kinds = np.where(copies.is_blocking[own_copies], int(WorkKind.BLOCKING_COPY), int(WorkKind.COPY))
    parts = (
        _columns(first, int(WorkKind.KERNELS), stream_of[first], *_clocks(seconds[kernels], issue[kernels], runs)),
        _columns(
            copied, kinds, stream_of[copied], issue[copied], seconds[copied], _ENGINE_OF[copies.direction[own_copies]]
        ),
        _waits(priced_tape, own_waits, _renamed(tape, own_waits, before)),
    )
    operator, kind, stream, *figures = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    is_operator = kind <= WorkKind.BLOCKING_COPY
    # A wait comes before the operator of its number; the sort is stable, so waits between the same operators keep their order.
    order = np.argsort(2 * operator.astype(np.int64) + is_operator, kind="stable")
    columns = (kind.astype(np.int64), np.searchsorted(streams, stream), *figures)
    return StepWork(
        items=tuple(zip(*(column[order].tolist() for column in columns), strict=True)),
        operators=tuple((operator - ~is_operator)[order].tolist()),
        streams=tuple(streams.tolist()),
        kernels=kernels,
        runs=runs,
    )


def has_waits(tape: Tape, begin: int, end: int) -> bool:
    """Whether operators `[begin, end)` copy from or to the host, or something waits among them."""
    first, last = np.searchsorted(tape.copies.operator, (begin, end))
    return bool(last > first) or bool((tape.waits.kind[_own(tape, begin, end)] != WaitKind.RECORD).any())


def _own(tape: Tape, begin: int, end: int) -> slice:
    """The waits of operators `[begin, end)`.

    One after the last operator of a step counts for the step after it: both have as many operators before them, and a trace of a script ends where its
    last step ends. Where there is one step alone, it has them all.
    """
    is_alone = end == len(tape.operators) and int((tape.spans.kind == SpanKind.STEP).sum()) == 1
    return slice(*np.searchsorted(tape.waits.operator, (begin, end + 1 if is_alone else end)))


def _runs(kernels: Column, streams: Column, copies: Column, waits: Column) -> Column:
    """Where runs of `kernels` begin, and their number at the end: a run is on one stream, without a copy or a wait in between."""
    between = np.searchsorted(copies, kernels) + np.searchsorted(waits, kernels, side="right")
    changes = (np.diff(streams) != 0) | (np.diff(between) != 0)
    begins = np.append(0, np.flatnonzero(changes) + 1) if len(kernels) else np.zeros(0, dtype=np.int64)
    return np.append(begins, len(kernels)).astype(np.int64)


def _clocks(seconds: Column, issue: Column, runs: Column) -> tuple[Column, Column, Column]:
    """Of each run: seconds on the host, seconds on the card, and seconds from the first issue to the last end where the stream is free."""
    begins = runs[:-1]
    if not len(begins):
        return (np.zeros(0),) * 3
    on_host, on_card = np.add.reduceat(issue, begins), np.add.reduceat(seconds, begins)
    # The kernel that the card waits for last is issued at the sum of `issue` up to it, and all from it on run without a gap.
    issued, before = np.cumsum(issue), np.cumsum(seconds) - seconds
    late = np.maximum.reduceat(issued - before, begins) - (issued - issue)[begins] + before[begins] + on_card
    return on_host, on_card, late


def _columns(operator: Column, kind: Column | int, stream: Column, *figures: Column) -> tuple[Column, ...]:
    """Columns of items, with their first operators."""
    return (operator, np.broadcast_to(np.asarray(kind), operator.shape), stream, *figures)


def _waits(priced_tape: PricedTape, own: slice, renamed: dict[int, int]) -> tuple[Column, ...]:
    waits = priced_tape.tape.waits
    event = waits.event[own]
    if renamed:
        event = np.array([renamed.get(number, number) for number in event.tolist()], dtype=event.dtype)
    is_update = waits.kind[own] == WaitKind.HOST_UPDATES
    seconds = (waits.kind[own] == WaitKind.HOST_READS) * priced_tape.read_seconds
    seconds = seconds + is_update * waits.event[own].astype(np.float64) * KIB * priced_tape.update_seconds_per_byte
    runs = waits.kind[own] == WaitKind.HOST_RUNS
    seconds = seconds + runs * waits.event[own] * MICROSECOND * priced_tape.python_factor
    kind = _KIND_OF_WAIT[waits.kind[own]]
    return _columns(waits.operator[own], kind, waits.stream[own], event, seconds, np.zeros(len(event)))


def _renamed(tape: Tape, own: slice, before: tuple[int, int] | None) -> dict[int, int]:
    """Events that the step before has recorded, by those that this step records in their place.

    A program may make new events in each step and wait for those of the step before: in a replay of one step over and over these are its own.
    """
    if before is None:
        return {}
    new, old = (_recorded(tape, of) for of in (own, _own(tape, *before)))
    return dict(zip(old, new, strict=True)) if len(old) == len(new) and not set(old) & set(new) else {}


def _recorded(tape: Tape, own: slice) -> Sequence[int]:
    waits = tape.waits
    return waits.event[own][waits.kind[own] == WaitKind.RECORD].tolist()
