"""The clocks that the work of a step moves: of the host, of each stream, of the two copy engines and of the disk.

The host issues one operator after another. An operator starts when it is issued, when its stream is free and the events that the stream waits for
are complete, and, if it is a copy, when its engine has finished the copies issued before it. Each clock is moved to a maximum of
sums of others, so that a step that is replayed from where it ended settles on a period, and an added wait never makes anything earlier.
"""

import dataclasses
from collections.abc import Sequence

from tightfit.simulate.step_work import NUM_ENGINES, Item, WorkKind

# As plain integers: comparing with a member of an enumeration is several times slower.
(
    _KERNELS,
    _,
    _BLOCKING_COPY,
    _RECORD,
    _STREAM_FOR_EVENT,
    _HOST_FOR_EVENT,
    _HOST_FOR_STREAM,
    _HOST_FOR_DEVICE,
    _HOST_READS,
    _,
    _,
) = map(int, list(WorkKind))
# A step settles on a period, or on a cycle of a few rounds (two buffers in turn); one that does not in so many rounds is averaged over the last half.
_MAX_ROUNDS = 32
_MAX_CYCLE = 8
_SAME_SHARE = 1e-9


@dataclasses.dataclass(slots=True)
class Clocks:
    """Seconds at which the host, the streams, the copy engines and the disk are free, and at which events are complete."""

    host: float
    streams: list[float]
    engines: list[float]
    events: dict[int, float]

    @classmethod
    def at_start(cls, num_streams: int) -> "Clocks":
        """All at zero, with no event recorded."""
        return cls(host=0.0, streams=[0.0] * num_streams, engines=[0.0] * NUM_ENGINES, events={})

    def all(self) -> list[float]:
        """The clocks, in an order that stays."""
        return [self.host, *self.streams, *self.engines]

    def advance(self, items: Sequence[Item]) -> None:
        """Moves the clocks by a step."""
        host, streams, engines, events = self.host, self.streams, self.engines, self.events
        # Plain comparisons instead of max(), which costs a call: a step may have tens of thousands of items.
        for kind, stream, a, seconds, b in items:
            if kind == _KERNELS:
                end, late = streams[stream] + seconds, host + b
                streams[stream] = end if end > late else late
                host += a
            elif kind <= _BLOCKING_COPY:
                host += a
                end = max(host, streams[stream], engines[int(b)]) + seconds
                streams[stream] = engines[int(b)] = end
                if kind == _BLOCKING_COPY:
                    host = end
            elif kind == _RECORD:
                events[int(a)] = streams[stream]
            elif kind == _STREAM_FOR_EVENT:
                streams[stream] = max(streams[stream], events.get(int(a), 0.0))
            elif kind == _HOST_FOR_EVENT:
                host = max(host, events.get(int(a), 0.0))
            elif kind == _HOST_FOR_STREAM:
                host = max(host, streams[stream])
            elif kind == _HOST_FOR_DEVICE:
                host = max(host, *streams)
            elif kind == _HOST_READS:
                host = streams[stream] = max(host, streams[stream]) + seconds
            else:
                host += seconds
        self.host = host


def settled(items: Sequence[Item], num_streams: int) -> tuple[Clocks, float]:
    """The clocks after so many rounds of a step that it has settled, and its period: the seconds that a step takes in a long row of them."""
    clocks = Clocks.at_start(num_streams)
    carried = _carried(items)
    # A delay passes from one clock to another at least once in a round.
    for _ in range(min(_MAX_ROUNDS, 1 + len(clocks.all()) + len(carried))):
        clocks.advance(items)
    history: list[list[float]] = []
    while len(history) < _MAX_ROUNDS:
        history.append([*clocks.all(), *(clocks.events[event] for event in carried)])
        for cycle in range(1, min(_MAX_CYCLE, (len(history) - 1) // 2) + 1):
            growth, before = _growth(history, -1, cycle), _growth(history, -1 - cycle, cycle)
            if all(abs(g - b) <= _SAME_SHARE * max(growth) for g, b in zip(growth, before, strict=True)):
                return clocks, max(growth) / cycle
        clocks.advance(items)
    half = len(history) // 2
    return clocks, (max(history[-1]) - max(history[-1 - half])) / half


def _growth(history: Sequence[Sequence[float]], at: int, cycle: int) -> list[float]:
    return [now - then for now, then in zip(history[at], history[at - cycle], strict=True)]


def _carried(items: Sequence[Item]) -> list[int]:
    """The events of which a record of the step before is waited for, and that are recorded at all."""
    recorded: set[int] = set()
    waited: set[int] = set()
    for kind, _, event, _, _ in items:
        if kind == _RECORD:
            recorded.add(int(event))
        elif kind in (_STREAM_FOR_EVENT, _HOST_FOR_EVENT) and int(event) not in recorded:
            waited.add(int(event))
    return sorted(waited & recorded)
