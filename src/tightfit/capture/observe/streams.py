"""Streams and events of the virtual GPU. Streams matter to the allocator, because its pools are per stream; what they record and wait for goes to the
tape, where it orders the timeline (`tightfit.simulate.timeline`).

Time does not pass here: an event is complete as soon as it is queried.
"""

import itertools
from types import TracebackType
from typing import Any, Self

import torch

from tightfit.capture.observe.recorder import Recorder
from tightfit.tape import WaitKind

DEFAULT_STREAM = 0


class VirtualEvent:
    """Answers to `torch.cuda.Event` and `torch.Event`."""

    recorder: Recorder
    _numbers = itertools.count()

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self.device = torch.device("cuda", 0)
        # On the tape events have numbers; one that is never recorded needs none.
        self._number: int | None = None

    def record(self, stream: Any = None) -> None:
        """Marks a place in `stream`, by default the current one. A second call moves the mark."""
        if self._number is None:
            self._number = next(self._numbers)
        self.recorder.waits.add(WaitKind.RECORD, stream=(stream or current_stream()).stream_id, event=self._number)

    def wait(self, stream: Any = None) -> None:
        """Orders `stream`, by default the current one, after the mark. Without a mark there is nothing to wait for."""
        if self._number is not None:
            number = (stream or current_stream()).stream_id
            self.recorder.waits.add(WaitKind.STREAM_FOR_EVENT, stream=number, event=self._number)

    def query(self) -> bool:
        """Whether the event is complete: always."""
        return True

    def elapsed_time(self, end_event: Self) -> float:
        """Milliseconds between two events: one, since nothing is run."""
        # Not 0: programs divide by it to log a throughput.
        return 1.0

    def synchronize(self) -> None:
        """The host waits for the event."""
        if self._number is not None:
            self.recorder.waits.add(WaitKind.HOST_FOR_EVENT, event=self._number)


class VirtualStream:
    """Answers to `torch.cuda.Stream` and `torch.Stream`. The default stream is number 0."""

    recorder: Recorder
    _numbers = itertools.count(1)

    def __init__(self, device: Any = None, priority: int = 0, stream_id: int | None = None, **_kwargs: Any) -> None:
        self.stream_id = next(self._numbers) if stream_id is None else stream_id
        self.device = torch.device("cuda", 0)
        self.device_index = 0
        # c10/core/DeviceType.h: CUDA.
        self.device_type = 1
        self.cuda_stream = self.stream_id
        self.priority = priority
        self._previous: list[VirtualStream] = []

    def wait_event(self, event: VirtualEvent) -> None:
        """Orders this stream after `event`."""
        event.wait(self)

    def wait_stream(self, stream: Self) -> None:
        """Orders this stream after all that `stream` has been given so far."""
        self.wait_event(stream.record_event())

    def record_event(self, event: VirtualEvent | None = None) -> VirtualEvent:
        """An event at this place of the stream."""
        event = VirtualEvent() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        """Whether all work is done: always."""
        return True

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured: never, it would hold no more memory than the eager run."""
        return False

    def synchronize(self) -> None:
        """Waits for the stream: what was freed while it was in use can be reused now."""
        self.recorder.waits.add(WaitKind.HOST_FOR_STREAM, stream=self.stream_id)
        self.recorder.synchronize()

    def __enter__(self) -> Self:
        self._previous.append(current_stream())
        set_stream(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        set_stream(self._previous.pop())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VirtualStream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return hash(self.stream_id)

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device=cuda:0 cuda_stream={self.stream_id:#x}>"


def synchronize(recorder: Recorder) -> None:
    """`torch.cuda.synchronize`: the host waits for all streams."""
    recorder.waits.add(WaitKind.HOST_FOR_DEVICE)
    recorder.synchronize()


class StreamScope:
    """`with torch.cuda.stream(stream)`; None changes nothing."""

    def __init__(self, stream: VirtualStream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.stream is not None:
            self.stream.__exit__(kind, value, traceback)


_current = [VirtualStream(stream_id=DEFAULT_STREAM)]


def current_stream(device: Any = None) -> VirtualStream:
    """`torch.cuda.current_stream`."""
    return _current[0]


def default_stream(device: Any = None) -> VirtualStream:
    """`torch.cuda.default_stream`."""
    return VirtualStream(stream_id=DEFAULT_STREAM)


def set_stream(stream: VirtualStream) -> None:
    """`torch.cuda.set_stream`: what is allocated from now on belongs to `stream`."""
    _current[0] = stream
    VirtualStream.recorder.stream = stream.stream_id
