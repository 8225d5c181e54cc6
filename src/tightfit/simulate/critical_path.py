"""Which operators a step waits for: one more round of a settled step, in which every clock remembers what moved it.

`Followed` replays the items as `Clocks.advance` does, with a node for each move: the time from `begin` to `end` and the node that it had to
wait for, which ended at `begin`.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tightfit.simulate.clocks import Clocks
from tightfit.simulate.step_work import Item, StepWork, WorkKind

HOST = "host"
ENGINES = ("copy engine to the GPU", "copy engine to the host", "disk")
"""The names of resources, copy engines by their numbers in `step_work`; streams are `stream 0`, and so on. `network` is kept for what moves on it."""

Clock = tuple[float, int]  # seconds, and the node that set it; -1: none


class PathNode(NamedTuple):
    """What moved a clock: an item of a round, on `resource`. `cause` ended where this begins. `is_late`: a run of kernels that waited for the host."""

    cause: int
    item: int
    resource: str
    begin: float
    end: float
    is_late: bool = False


class Followed:
    """Rounds of a step with their causes, from `clocks` on."""

    def __init__(self, work: StepWork, clocks: Clocks) -> None:
        self.work = work
        self.nodes: list[PathNode] = []
        self.began: list[tuple[float, float]] = []
        """The clocks of host and stream before each item of the last round."""
        self.copied: list[tuple[int, float, float]] = []
        """The item, begin and end of each copy of the last round."""
        self._names = [f"stream {number}" for number in work.streams]
        self._host: Clock = (clocks.host, -1)
        self._streams: list[Clock] = [(seconds, -1) for seconds in clocks.streams]
        self._engines: list[Clock] = [(seconds, -1) for seconds in clocks.engines]
        self._events: dict[int, Clock] = {event: (seconds, -1) for event, seconds in clocks.events.items()}

    @property
    def latest(self) -> Clock:
        """The clock that is furthest."""
        return max(self._host, *self._streams, *self._engines)

    def advance(self) -> None:
        """One round."""
        self.began.clear()
        self.copied.clear()
        for number, item in enumerate(self.work.items):
            stream = item[1]
            self.began.append((self._host[0], self._streams[stream][0]))
            if item[0] == WorkKind.KERNELS:
                self._kernels(number, item)
            elif item[0] in (WorkKind.COPY, WorkKind.BLOCKING_COPY):
                self._copy(number, item)
            else:
                self._wait(number, item)

    def _node(self, cause: Clock, item: int, resource: str, seconds: float, is_late: bool = False) -> Clock:
        begin, node = cause
        self.nodes.append(PathNode(node, item, resource, begin, begin + seconds, is_late))
        return begin + seconds, len(self.nodes) - 1

    def _kernels(self, number: int, item: Item) -> None:
        _, stream, on_host, on_card, late = item
        resource = self._names[stream]
        if self._streams[stream][0] + on_card > self._host[0] + late:
            self._streams[stream] = self._node(self._streams[stream], number, resource, on_card)
        else:
            self._streams[stream] = self._node(self._host, number, resource, late, is_late=True)
        self._host = self._node(self._host, number, HOST, on_host)

    def _copy(self, number: int, item: Item) -> None:
        kind, stream, on_host, seconds, number_of_engine = item
        engine = int(number_of_engine)
        self._host = self._node(self._host, number, HOST, on_host)
        ready = max(self._host, self._streams[stream], self._engines[engine])
        done = self._node(ready, number, ENGINES[engine], seconds)
        self._streams[stream] = self._engines[engine] = done
        self.copied.append((number, ready[0], done[0]))
        if kind == WorkKind.BLOCKING_COPY:
            self._host = done

    def _wait(self, number: int, item: Item) -> None:
        kind, stream, event, seconds, _ = item
        never = (0.0, -1)
        if kind == WorkKind.RECORD:
            self._events[int(event)] = self._streams[stream]
        elif kind == WorkKind.STREAM_FOR_EVENT:
            self._streams[stream] = max(self._streams[stream], self._events.get(int(event), never))
        elif kind == WorkKind.HOST_FOR_EVENT:
            self._host = max(self._host, self._events.get(int(event), never))
        elif kind == WorkKind.HOST_FOR_STREAM:
            self._host = max(self._host, self._streams[stream])
        elif kind == WorkKind.HOST_FOR_DEVICE:
            self._host = max(self._host, *self._streams)
        elif kind in (WorkKind.HOST_UPDATES, WorkKind.HOST_RUNS):
            self._host = self._node(self._host, number, HOST, seconds)
        else:
            ready = max(self._host, self._streams[stream])
            self._host = self._streams[stream] = self._node(ready, number, HOST, seconds)

    def path(self, since: float) -> Iterator[PathNode]:
        """The nodes that the furthest clock waited for one after another, the last first, back to the time `since`."""
        at = self.latest[1]
        while at >= 0 and self.nodes[at].end > since:
            yield self.nodes[at]
            at = self.nodes[at].cause


def ends_in_run(seconds: np.ndarray, issue: np.ndarray, host: float, stream: float) -> np.ndarray:
    """When each kernel of a run ends, where the run finds the host and its stream at these times."""
    done = np.cumsum(seconds)
    issued = host + np.cumsum(issue)
    # A kernel ends with the busy time since the latest moment at which the stream had to wait for the host.
    return done + np.maximum(stream, np.maximum.accumulate(issued - (done - seconds)))
