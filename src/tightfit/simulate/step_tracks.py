"""What runs when in a step: a track for the host, each stream and each copy engine, with what the step waits for (its critical path).

A settled step repeats, so each track is one period of it: what the host issues ahead, for a step that begins later, stands where it happens in that
period. A host that nothing makes wait is ahead by as much as the queue of kernels lets it; it is drawn from the period's beginning.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from tightfit.cost.doubts import WORDS, ErrorKind, error_kinds
from tightfit.cost.roofline import arithmetic_of_operators
from tightfit.devices.device import Device
from tightfit.simulate.critical_path import ENGINES, HOST, Followed, ends_in_run
from tightfit.simulate.step_work import PricedTape, WorkKind
from tightfit.simulate.timeline import CriticalWork, StepTimeline, followed_step, timeline_of
from tightfit.tape import Column, Phase, Tape

ISSUING, READING, UPDATING, RUNNING = (
    "the host issues operators",
    "the host reads values back",
    "the host updates parameters",
    "Python of techniques",
)
_OF_HOST = {WorkKind.HOST_READS: READING, WorkKind.HOST_UPDATES: UPDATING, WorkKind.HOST_RUNS: RUNNING}
_SMALLEST_SHARE = 1e-9
# Whatever makes the host wait ties its clock to the others.
_TIES = {
    WorkKind.BLOCKING_COPY,
    WorkKind.HOST_FOR_EVENT,
    WorkKind.HOST_FOR_STREAM,
    WorkKind.HOST_FOR_DEVICE,
    WorkKind.HOST_READS,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrackWork:
    """Work without a gap on one track, in seconds from the period's beginning; `what` is the kind of work. `name` is the operator's, empty for the host's own work."""

    begin_seconds: float
    end_seconds: float
    what: str
    name: str
    module: str
    phase: Phase
    is_critical: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepTrack:
    """A resource of a step, the work on it in order, and how long it is idle."""

    resource: str
    idle_seconds: float
    work: tuple[TrackWork, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepTracks:
    """The tracks of a step of `seconds`. `critical_seconds` says what the step waits for: seconds by kind of work and resource, the longest first; they add up to `seconds`."""

    seconds: float
    tracks: tuple[StepTrack, ...]
    critical_seconds: Mapping[tuple[str, str], float]


def step_tracks(prices: PricedTape, device: Device, step: int = -1) -> StepTracks:
    """The tracks of one span of kind `STEP` on `device`, by default the last.

    Raises:
        IndexError: the tape has no such step.
    """
    followed, seconds = followed_step(prices, step)
    timeline = timeline_of(prices, followed, seconds)
    tape = prices.tape
    words = [WORDS[ErrorKind(kind)] for kind in error_kinds(tape, arithmetic_of_operators(tape), device).tolist()]
    critical = {(part.resource, _what(part, words), part.operator) for part in timeline.critical_path}
    found: dict[str, list[TrackWork]] = {resource: [] for resource in _ordered(timeline.idle_seconds)}
    for resource, what, operator, begin, end in _intervals(prices, followed, words):
        work = _work(tape, operator, what, is_critical=(resource, what, operator) in critical)
        found[resource] += [
            dataclasses.replace(work, begin_seconds=b, end_seconds=e) for b, e in _folded(begin, end, seconds)
        ]
    return StepTracks(
        seconds=seconds,
        tracks=tuple(
            StepTrack(
                resource=resource,
                idle_seconds=timeline.idle_seconds[resource],
                work=tuple(sorted(work, key=lambda part: part.begin_seconds)),
            )
            for resource, work in found.items()
        ),
        critical_seconds=_critical_seconds(timeline, words),
    )


def _ordered(resources: Iterable[str]) -> list[str]:
    """The host, the streams by their numbers, the engines."""

    def place(resource: str) -> tuple[int, int]:
        if resource == HOST:
            return 0, 0
        return (2, ENGINES.index(resource)) if resource in ENGINES else (1, int(resource.rpartition(" ")[2]))

    return sorted(resources, key=place)


def _work(tape: Tape, operator: int, what: str, *, is_critical: bool) -> TrackWork:
    row = tape.operators
    return TrackWork(
        begin_seconds=0.0,
        end_seconds=0.0,
        what=what,
        name="" if what in _OF_HOST.values() else tape.strings[row.name[operator]],
        module=tape.strings[row.module[operator]],
        phase=Phase(row.phase[operator]),
        is_critical=is_critical,
    )


def _intervals(
    prices: PricedTape, followed: Followed, words: list[str]
) -> Iterator[tuple[str, str, int, float, float]]:
    """Resource, kind of work, operator, begin and end of all work of the last round, from the period's beginning on."""
    work = followed.work
    num_run, copies = 0, {number: (begin, end) for number, begin, end in followed.copied}
    origin = _origin(followed)
    is_tied = any(item[0] in _TIES for item in work.items)
    host_origin = origin if is_tied else followed.began[0][0] if followed.began else 0.0
    names = [f"stream {number}" for number in work.streams]
    for number, (item, (host, stream)) in enumerate(zip(work.items, followed.began, strict=True)):
        operator, kind = work.operators[number], WorkKind(item[0])
        if kind is WorkKind.KERNELS:
            kernels = work.kernels[work.runs[num_run] : work.runs[num_run + 1]]
            num_run += 1
            yield from _of_run(
                prices, kernels, words, names[item[1]], host - host_origin, host - origin, stream - origin
            )
        elif kind in (WorkKind.COPY, WorkKind.BLOCKING_COPY):
            yield HOST, ISSUING, operator, host - host_origin, host - host_origin + item[2]
            begin, end = copies[number]
            yield ENGINES[int(item[4])], words[operator], operator, begin - origin, end - origin
        elif kind in _OF_HOST:
            begin = max(host, stream) if kind is WorkKind.HOST_READS else host
            yield HOST, _OF_HOST[kind], operator, begin - host_origin, begin - host_origin + item[3]


def _origin(followed: Followed) -> float:
    """Where the period begins: with the first work on a stream, or of the host where there is none."""
    for item, (host, stream) in zip(followed.work.items, followed.began, strict=True):
        if item[0] == WorkKind.KERNELS:
            return max(host, stream)
    return followed.began[0][0] if followed.began else 0.0


def _of_run(
    prices: PricedTape, kernels: Column, words: list[str], resource: str, issued: float, host: float, stream: float
) -> Iterator[tuple[str, str, int, float, float]]:
    """Each kernel of a run, on the host and on its stream; `issued` is the host's clock as it is drawn, `host` and `stream` are the clocks that it has."""
    seconds, issue = prices.seconds[kernels], prices.issue_seconds[kernels]
    ends = ends_in_run(seconds, issue, host, stream)
    issued_at = issued + np.cumsum(issue)
    rows = zip(kernels.tolist(), seconds.tolist(), issue.tolist(), ends.tolist(), issued_at.tolist(), strict=True)
    for operator, on_card, on_host, end, done in rows:
        if on_host > 0:
            yield HOST, ISSUING, operator, done - on_host, done
        if on_card > 0:
            yield resource, words[operator], operator, end - on_card, end


def _folded(begin: float, end: float, period: float) -> Iterator[tuple[float, float]]:
    """The interval within one period: in two pieces where it goes over its end."""
    length = min(end - begin, period)
    if length <= _SMALLEST_SHARE * period:
        return
    begin %= period
    # What begins within rounding of the period's end begins with the period.
    begin = 0.0 if period - begin <= _SMALLEST_SHARE * period else begin
    yield begin, min(begin + length, period)
    if begin + length > period * (1 + _SMALLEST_SHARE):
        yield 0.0, begin + length - period


def _critical_seconds(timeline: StepTimeline, words: list[str]) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], float] = {}
    for part in timeline.critical_path:
        key = (_what(part, words), part.resource)
        found[key] = found.get(key, 0.0) + part.seconds
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def _what(part: CriticalWork, words: list[str]) -> str:
    if part.kind in _OF_HOST:
        return _OF_HOST[part.kind]
    return ISSUING if part.resource == HOST else words[part.operator]
