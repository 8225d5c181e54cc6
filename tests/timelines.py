"""Tapes of steps in a few words, with prices in whole seconds, and a replay of them operator by operator."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from tightfit.simulate.step_work import PricedTape
from tightfit.tape import (
    Copies,
    CopyDirection,
    EventKind,
    Events,
    Operators,
    SpanKind,
    Spans,
    Storages,
    Table,
    Tape,
    WaitKind,
    Waits,
)

READ_SECONDS = 0.25


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A kernel on a stream. `issue` 0 and `seconds` 0: a view."""

    seconds: float = 1.0
    stream: int = 0
    issue: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A copy between host and card."""

    seconds: float = 1.0
    stream: int = 0
    issue: float = 0.0
    direction: CopyDirection = CopyDirection.TO_CARD
    is_blocking: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A record or a wait."""

    kind: WaitKind
    stream: int = -1
    event: int = -1


Row = Kernel | Copy | Wait


def record(stream: int, event: int) -> Wait:
    return Wait(kind=WaitKind.RECORD, stream=stream, event=event)


def wait(stream: int, event: int) -> Wait:
    return Wait(kind=WaitKind.STREAM_FOR_EVENT, stream=stream, event=event)


def read(stream: int = 0) -> Wait:
    return Wait(kind=WaitKind.HOST_READS, stream=stream)


def update(seconds: int) -> Wait:
    """The host updates parameters: a second for a KiB."""
    return Wait(kind=WaitKind.HOST_UPDATES, event=seconds)


def empty(table: type[Table]) -> Any:
    return table.from_columns({field.name: [] for field in dataclasses.fields(table)})


def priced_steps(*steps: Sequence[Row]) -> PricedTape:
    """Steps one after another, with their prices."""
    rows = [row for step in steps for row in step]
    issued = [row for row in rows if not isinstance(row, Wait)]
    copies = [(at, row) for at, row in enumerate(issued) if isinstance(row, Copy)]
    ends = np.cumsum([sum(not isinstance(row, Wait) for row in step) for step in steps]).tolist()
    waits, num_operators = [], 0
    for row in rows:
        if isinstance(row, Wait):
            waits.append((int(row.kind), num_operators, row.stream, row.event))
        else:
            num_operators += 1
    nothing = [0] * len(issued)
    tape = Tape(
        target="test",
        versions={},
        traced_for="",
        strings=("",),
        operators=Operators.from_columns(
            {field.name: nothing for field in dataclasses.fields(Operators)}
            | {"stream": [row.stream for row in issued]}
        ),
        storages=empty(Storages),
        # One event at the begin of each step.
        events=Events.from_columns(
            {
                "kind": [EventKind.EMPTY_CACHE] * len(steps),
                "storage": [-1] * len(steps),
                "operator": [0, *ends][: len(steps)],
                "value": [0] * len(steps),
            }
        ),
        spans=Spans.from_columns(
            {
                "name": [0] * len(steps),
                "kind": [SpanKind.STEP] * len(steps),
                "begin": range(len(steps)),
                "end": range(1, len(steps) + 1),
            }
        ),
        assumptions=(),
        host_peak_bytes=0,
        copies=Copies.from_columns(
            {
                "operator": [at for at, _ in copies],
                "direction": [row.direction for _, row in copies],
                "is_pinned": [True] * len(copies),
                "is_blocking": [row.is_blocking for _, row in copies],
                "num_bytes": [1000] * len(copies),
            }
        ),
        waits=Waits.from_columns(
            dict(zip(("kind", "operator", "stream", "event"), zip(*waits, strict=True), strict=True))
            if waits
            else {"kind": [], "operator": [], "stream": [], "event": []}
        ),
    )
    return PricedTape(
        tape=tape,
        seconds=np.array([row.seconds for row in issued]),
        issue_seconds=np.array([row.issue for row in issued]),
        read_seconds=READ_SECONDS,
        update_seconds_per_byte=1.0 / 1024,
    )


def replayed_one_by_one(step: Sequence[Row], num_rounds: int) -> float:
    """Seconds per step of the last half of so many rounds, each row by itself: what the timeline has to come to."""
    host, streams, engines, events = 0.0, dict[int, float](), dict[int, float](), dict[int, float]()
    ends = []
    for _ in range(num_rounds):
        for row in step:
            if isinstance(row, Wait):
                done = streams.get(row.stream, 0.0)
                if row.kind == WaitKind.RECORD:
                    events[row.event] = done
                elif row.kind == WaitKind.STREAM_FOR_EVENT:
                    streams[row.stream] = max(done, events.get(row.event, 0.0))
                elif row.kind == WaitKind.HOST_FOR_EVENT:
                    host = max(host, events.get(row.event, 0.0))
                elif row.kind == WaitKind.HOST_FOR_STREAM:
                    host = max(host, done)
                elif row.kind == WaitKind.HOST_FOR_DEVICE:
                    host = max(host, *streams.values(), 0.0)
                elif row.kind == WaitKind.HOST_UPDATES:
                    host += row.event
                else:
                    host = streams[row.stream] = max(host, done) + READ_SECONDS
                continue
            host += row.issue
            begin = max(host, streams.get(row.stream, 0.0))
            if isinstance(row, Copy):
                # The disk is one, whichever way.
                engine = min(row.direction, CopyDirection.TO_DISK)
                begin = max(begin, engines.get(engine, 0.0))
                engines[engine] = begin + row.seconds
                host = begin + row.seconds if row.is_blocking else host
            if row.seconds or row.issue:
                streams[row.stream] = begin + row.seconds
        ends.append(max([host, *streams.values(), *engines.values()]))
    half = num_rounds // 2
    return (ends[-1] - ends[half - 1]) / (num_rounds - half)
