"""Seconds of each step of a tape, as a timeline: the host issues operators, streams run them, and copies to and from the host have engines of their own.

Eager torch issues kernels one by one from the host; a GPU that is faster than that waits. Streams overlap, except where one waits for an event of
another; a copy overlaps with kernels and with copies in the other direction, and the disk with all of these; the host runs ahead of the GPU until something makes it wait:
`.item()`, a copy that is not `non_blocking`, pageable memory, `synchronize`. A step takes what it takes in a long row of steps like it.

Not modelled: kernels that slow each other down on different streams or beside copies, links that are slower in both directions at once, the limit
of about a thousand kernels that can be issued ahead, the host's own work (data loading, logging), and what the calls for events cost.
A copy waits for copies in its direction that were issued earlier, even where these wait for something else. The disk either reads or writes.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from tightfit.cost.steps import step_operators
from tightfit.devices.calibration import Calibration
from tightfit.devices.device import Device
from tightfit.simulate.clocks import settled
from tightfit.simulate.critical_path import ENGINES, HOST, Followed, PathNode, ends_in_run
from tightfit.simulate.step_work import PricedTape, StepWork, WorkKind, has_waits, priced, work_of
from tightfit.tape import Column, CopyDirection, Tape

_SMALLEST_SHARE = 1e-12


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CriticalWork:
    """A part of a step that the step waits for: seconds of `operator` on `resource`, for work of a `kind`. For a read or wait of the host, the operator before it."""

    operator: int
    resource: str
    seconds: float
    kind: WorkKind = WorkKind.KERNELS


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CopyTime:
    """A copy between host and card, or disk. `hidden_seconds` of its `seconds` passed while kernels ran."""

    operator: int
    direction: CopyDirection
    num_bytes: int
    seconds: float
    hidden_seconds: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeline:
    """A step in a long row of steps like it.

    `idle_seconds` is of each resource: the host, each stream with kernels, and each copy engine that is used. `critical_path` has what the step waited
    for in order, and adds up to `seconds`.
    """

    seconds: float
    idle_seconds: Mapping[str, float]
    critical_path: tuple[CriticalWork, ...]
    copies: tuple[CopyTime, ...]

    def copy_seconds(self, direction: CopyDirection) -> float:
        """Seconds of all copies of one direction."""
        return sum(copy.seconds for copy in self.copies if copy.direction == direction)

    def hidden_seconds(self, direction: CopyDirection) -> float:
        """How many of them passed while kernels ran."""
        return sum(copy.hidden_seconds for copy in self.copies if copy.direction == direction)


def step_seconds(
    tape: Tape,
    device: Device,
    calibration: Calibration | None = None,
    *,
    tf32_matmul: bool | None = None,
    tf32_convolution: bool | None = None,
) -> list[float]:
    """Seconds of each span of kind `STEP`, in order; the options are those of `operator_seconds`."""
    prices = priced(tape, device, calibration, tf32_matmul=tf32_matmul, tf32_convolution=tf32_convolution)
    return seconds_of_steps(prices)


def seconds_of_steps(prices: PricedTape) -> list[float]:
    """Seconds of each span of kind `STEP`, in order."""
    return [_seconds(prices, *of_step) for of_step in _steps(prices.tape)]


def seconds_of_step(prices: PricedTape) -> float:
    """Seconds of the last span of kind `STEP`; 0 where there is none."""
    steps = list(_steps(prices.tape))
    return _seconds(prices, *steps[-1]) if steps else 0.0


def busy_seconds_of_steps(prices: PricedTape) -> list[float]:
    """Of each step, how long the stream with the most work runs kernels: in the rest of the step the GPU is idle."""
    is_copy = np.zeros(len(prices.seconds), dtype=np.bool_)
    is_copy[prices.tape.copies.operator] = True
    kernels = np.where(is_copy, 0.0, prices.seconds)
    return [_busiest(prices, kernels, begin, end) for begin, end, _ in _steps(prices.tape)]


def step_timeline(prices: PricedTape, step: int = -1) -> StepTimeline:
    """The timeline of one span of kind `STEP`, by default the last.

    Raises:
        IndexError: the tape has no such step.
    """
    return timeline_of(prices, *followed_step(prices, step))


def followed_step(prices: PricedTape, step: int = -1) -> tuple[Followed, float]:
    """A settled step, replayed with the causes of each move of a clock, and its seconds.

    Raises:
        IndexError: the tape has no such step.
    """
    work = work_of(prices, *list(_steps(prices.tape))[step])
    clocks, seconds = settled(work.items, len(work.streams))
    followed = Followed(work, clocks)
    # The last round begins with what led to the end of the one before it, and ends with what no later one waits for.
    for _ in range(3):
        followed.advance()
    return followed, seconds


def timeline_of(prices: PricedTape, followed: Followed, seconds: float) -> StepTimeline:
    """The timeline of what `followed_step` has found."""
    return StepTimeline(
        seconds=seconds,
        idle_seconds=_idle(prices, followed.work, seconds),
        critical_path=tuple(_path(prices, followed, seconds)),
        copies=tuple(_copies(prices, followed, seconds)),
    )


def _steps(tape: Tape) -> Iterator[tuple[int, int, tuple[int, int] | None]]:
    """The operators of each step, and those of the step before."""
    before = None
    for begin, end in step_operators(tape):
        yield begin, end, before
        before = (begin, end)


def _seconds(prices: PricedTape, begin: int, end: int, before: tuple[int, int] | None) -> float:
    tape = prices.tape
    if not has_waits(tape, begin, end):
        # The same to rounding as the settled timeline, without it: the busiest stream, or the host.
        return max(_busiest(prices, prices.seconds, begin, end), float(prices.issue_seconds[begin:end].sum()))
    work = work_of(prices, begin, end, before)
    return settled(work.items, len(work.streams))[1]


def _busiest(prices: PricedTape, seconds: Column, begin: int, end: int) -> float:
    stream = prices.tape.operators.stream[begin:end]
    return max((float(seconds[begin:end][stream == number].sum()) for number in np.unique(stream)), default=0.0)


def _idle(prices: PricedTape, work: StepWork, seconds: float) -> dict[str, float]:
    busy: dict[str, float] = {HOST: 0.0}
    stream_of = prices.tape.operators.stream[work.kernels]
    for number in np.unique(stream_of).tolist():
        busy[f"stream {number}"] = float(prices.seconds[work.kernels][stream_of == number].sum())
    for kind, _, on_host, copying, number in work.items:
        if kind in (WorkKind.KERNELS, WorkKind.COPY, WorkKind.BLOCKING_COPY):
            busy[HOST] += on_host
        if kind in (WorkKind.HOST_UPDATES, WorkKind.HOST_RUNS):
            busy[HOST] += copying
        if kind in (WorkKind.COPY, WorkKind.BLOCKING_COPY):
            engine = ENGINES[int(number)]
            busy[engine] = busy.get(engine, 0.0) + copying
    return {resource: max(0.0, seconds - taken) for resource, taken in busy.items()}


def _path(prices: PricedTape, followed: Followed, seconds: float) -> list[CriticalWork]:
    """The period before the last: what it ends with is what the last one waits for."""
    until = followed.latest[0] - seconds
    since = until - seconds
    found = []
    for node in followed.path(since):
        if node.begin >= until:
            continue
        end = node.end
        for operator, resource, taken in reversed(list(_of_node(prices, followed.work, node))):
            within = min(end, until) - max(end - taken, since)
            # Less is rounding at the edges of the period.
            if within > _SMALLEST_SHARE * seconds:
                kind = WorkKind(followed.work.items[node.item][0])
                found.append(CriticalWork(operator=operator, resource=resource, seconds=within, kind=kind))
            end -= taken
    return found[::-1]


def _of_node(prices: PricedTape, work: StepWork, node: PathNode) -> Iterator[tuple[int, str, float]]:
    """The operators of a node with their seconds, which are one after another."""
    item = work.items[node.item]
    if item[0] != WorkKind.KERNELS:
        yield work.operators[node.item], node.resource, node.end - node.begin
        return
    kernels = _run(work, node.item)
    if len(kernels) == 1:
        operator = int(kernels[0])
        if node.resource == HOST or node.is_late:
            yield operator, HOST, float(prices.issue_seconds[operator])
        if node.resource != HOST:
            yield operator, node.resource, float(prices.seconds[operator])
        return
    issue, seconds = prices.issue_seconds[kernels], prices.seconds[kernels]
    if node.resource == HOST:
        last_issued, first = len(kernels), len(kernels)
    elif node.is_late:
        # The host issues kernels up to the one that the stream waited for last.
        first = int((np.cumsum(issue) - (np.cumsum(seconds) - seconds)).argmax())
        last_issued = first + 1
    else:
        last_issued = first = 0
    for operator, taken in zip(kernels[:last_issued].tolist(), issue[:last_issued].tolist(), strict=True):
        yield operator, HOST, taken
    for operator, taken in zip(kernels[first:].tolist(), seconds[first:].tolist(), strict=True):
        yield operator, node.resource, taken


def _run(work: StepWork, item: int) -> Column:
    """The operators of an item that is a run of kernels."""
    begin = int(np.searchsorted(work.kernels, work.operators[item]))
    end = int(work.runs[np.searchsorted(work.runs, begin, side="right")])
    return work.kernels[begin:end]


def _copies(prices: PricedTape, followed: Followed, seconds: float) -> Iterator[CopyTime]:
    if not followed.copied:
        return
    work, tape = followed.work, prices.tape
    busy = _busy_before(prices, followed, seconds)
    for number, begin, end in followed.copied:
        operator = work.operators[number]
        row = int(np.searchsorted(tape.copies.operator, operator))
        yield CopyTime(
            operator=operator,
            direction=CopyDirection(tape.copies.direction[row]),
            num_bytes=int(tape.copies.num_bytes[row]),
            seconds=end - begin,
            hidden_seconds=min(end - begin, max(0.0, busy(end) - busy(begin))),
        )


def _busy_before(prices: PricedTape, followed: Followed, period: float) -> Callable[[float], float]:
    """The seconds up to a time in which some kernel runs, where each period is as the last round."""
    work = followed.work
    if not len(work.kernels):
        return lambda _: 0.0
    clocks = [began for item, began in zip(work.items, followed.began, strict=True) if item[0] == WorkKind.KERNELS]
    seconds, issue = prices.seconds[work.kernels], prices.issue_seconds[work.kernels]
    host, stream = np.array(clocks).T
    first = work.runs[:-1]
    # All runs at once as if each were its first kernel, and then those that are longer: in a step of many waits most are not.
    end = np.empty(len(seconds))
    end[first] = np.maximum(host + issue[first], stream) + seconds[first]
    for run in np.flatnonzero(np.diff(work.runs) > 1).tolist():
        of_run = slice(work.runs[run], work.runs[run + 1])
        end[of_run] = ends_in_run(seconds[of_run], issue[of_run], host[run], stream[run])
    begin = end - seconds
    # Each interval within the first period, in two pieces where it goes over its end.
    begin, end = begin % period, begin % period + (end - begin)
    begin = np.concatenate([begin, np.zeros(int((end > period).sum()))])
    end = np.concatenate([np.minimum(end, period), end[end > period] - period])
    order = np.argsort(begin)
    begin, end = begin[order], np.maximum.accumulate(end[order])
    gaps = np.flatnonzero(begin[1:] > end[:-1])
    edges = np.sort(np.concatenate([begin[:1], begin[gaps + 1], end[gaps], end[-1:]]))
    passed = np.repeat(np.cumsum(np.append(0.0, edges[1::2] - edges[::2])), 2)[1:-1]
    return lambda time: float(time // period * passed[-1] + np.interp(time % period, edges, passed))
