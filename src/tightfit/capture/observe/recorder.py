"""Collects a tape while a workload runs: appends to plain lists, and turns them into columns once at the end.

Also the live view behind `torch.cuda.memory_allocated` and similar functions: it replays the events so far through the simulated allocator when
it is queried, and costs nothing otherwise.
"""

from collections.abc import Mapping

from tightfit.allocator.caching import CachingAllocator
from tightfit.allocator.replay_tape import TapeReplay
from tightfit.allocator.settings import AllocatorSettings
from tightfit.capture.observe.host_storages import HostBytes
from tightfit.tape import (
    Assumption,
    Casts,
    Category,
    CollectiveKind,
    Collectives,
    Copies,
    CopyDirection,
    EventKind,
    Events,
    Geometry,
    Operators,
    Phase,
    Source,
    SpanKind,
    Spans,
    Storages,
    Tape,
    WaitKind,
    Waits,
)
from tightfit.tape.left_out import LeftOut


class CastLog:
    """The copies of weights that autocast's cache holds, and where it is emptied, in order: the operator of a copy with None, the event before which the cache is
    emptied with whether that is in the call of a module."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, bool | None]] = []

    def add(self, operator: int) -> None:
        """The result of `operator` is such a copy."""
        self.entries.append((operator, None))

    def end(self, event: int, *, is_of_module: bool) -> None:
        """The cache is emptied before `event`."""
        if self.entries and self.entries[-1][1] is None:
            self.entries.append((event, is_of_module))

    def rows(self, num_events: int) -> list[tuple[int, int, bool]]:
        """The rows of `Casts`; what is held to the end of the tape, which has so many events, ends there."""
        found, end, is_of_module = [], num_events, False
        for number, inside in reversed(self.entries):
            if inside is None:
                found.append((number, end, is_of_module))
            else:
                end, is_of_module = number, inside
        return found[::-1]


class DiskBytes:
    """The bytes of files that techniques keep tensors in, and their peak."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.peak_bytes = 0

    def hold(self, num_bytes: int) -> None:
        """Files have grown, or shrunk, by `num_bytes`."""
        self.num_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)


class StringTable:
    """The strings of a tape, each once; `texts` has them by index."""

    def __init__(self) -> None:
        self._indices: dict[str, int] = {"": 0}
        self.texts = [""]

    def intern(self, text: str) -> int:
        """The index of `text` among the strings."""
        index = self._indices.get(text)
        if index is None:
            index = self._indices[text] = len(self.texts)
            self.texts.append(text)
        return index


class CommunicationLog:
    """The groups of ranks, and the collectives among them."""

    def __init__(self) -> None:
        self.collectives: dict[str, list[int]] = {
            name: [] for name in ("operator", "kind", "num_bytes", "group", "group_size", "peer")
        }
        self.groups: list[tuple[int, ...]] = []
        self.world = (0, 1, 1)
        """The rank that is traced, of how many, on how many nodes."""

    def group(self, ranks: tuple[int, ...]) -> int:
        """Notes that a group of these ranks communicates on cards; returns its number."""
        self.groups.append(ranks)
        return len(self.groups) - 1

    def collective(
        self, operator: int, kind: CollectiveKind, num_bytes: int, group: int, group_size: int, peer: int
    ) -> None:
        """This operator is a collective."""
        row = (operator, kind, num_bytes, group, group_size, peer)
        for column, value in zip(self.collectives.values(), row, strict=True):
            column.append(value)


class WaitLog:
    """Waits of streams and of the host, between the operators of `recorder`."""

    def __init__(self, recorder: "Recorder") -> None:
        self.columns: dict[str, list[int]] = {name: [] for name in ("kind", "operator", "stream", "event")}
        self._recorder = recorder

    def add(self, kind: WaitKind, *, stream: int = -1, event: int = -1) -> None:
        """A stream records or waits for an event, or the host waits."""
        if self._recorder.is_beside and kind not in (WaitKind.RECORD, WaitKind.STREAM_FOR_EVENT):
            return
        row = (kind, self._recorder.num_operators, stream, event)
        for column, value in zip(self.columns.values(), row, strict=True):
            column.append(value)

    @property
    def number(self) -> int:
        """How many were recorded so far."""
        return len(self.columns["kind"])

    def forget(self, since: int) -> None:
        """Drops the waits from number `since` on."""
        for column in self.columns.values():
            del column[since:]


class Recorder:
    """The trace so far. The hot methods are `operator`, `allocate` and `free`."""

    def __init__(self) -> None:
        self.strings = StringTable()
        self.operators: dict[str, list[int | float]] = {
            name: []
            for name in ("name", "module", "line", "dtype", "phase", "stream", "flops", "bytes_read", "bytes_written")
        }
        self.storages: dict[str, list[int]] = {
            name: [] for name in ("num_bytes", "low_bytes", "high_bytes", "category", "source", "operator", "stream")
        }
        self.events: dict[str, list[int]] = {name: [] for name in ("kind", "storage", "operator", "value")}
        self.copies: dict[str, list[int]] = {
            name: [] for name in ("operator", "direction", "is_pinned", "is_blocking", "num_bytes")
        }
        self.communication = CommunicationLog()
        self.geometry: list[tuple[int, ...]] = []  # rows of `Geometry`
        self.casts = CastLog()
        self.waits = WaitLog(self)
        self.spans: list[tuple[str, SpanKind, int, int]] = []  # name, kind, first event, first operator
        self.assumptions: dict[tuple[str, str], None] = {}
        self.module_classes: dict[str, str] = {}  # by path; empty of two models of one class with other parts there
        self.called_modules: dict[int, None] = {}  # by their paths, as indices of strings
        self.optimizers: dict[str, None] = {}  # whose steps were made, by the names of their classes
        self.num_operators = 0
        self.phase = Phase.OTHER
        self.stream = 0
        self.is_in_thread = False  # of the program's own
        self.is_beside = False  # in such a thread, which keeps the main one from nothing
        self.host = HostBytes()
        self.disk = DiskBytes()
        self.left_out: list[LeftOut] = []
        self.memory_fraction = 1.0  # of the card, that the program may hold as it has set it last
        self.loops: set[str] = set()  # whose loops ran backward passes; empty is the program's own
        # Bound once: dict lookups by name would be a good part of what a row costs.
        self._operator_columns = tuple(self.operators.values())
        self._storage_columns = tuple(self.storages.values())
        self._event_columns = tuple(self.events.values())

    def operator(
        self, name: int, module: int, line: int, dtype: int, flops: float, bytes_read: int, bytes_written: int
    ) -> None:
        """One kernel call, on the current stream and in the current phase."""
        row = (name, module, line, dtype, self.phase, self.stream, flops, bytes_read, bytes_written)
        for column, value in zip(self._operator_columns, row, strict=True):
            column.append(value)
        self.num_operators += 1

    def allocate(
        self,
        num_bytes: int,
        category: int = Category.TEMPORARIES,
        source: int = Source.TENSOR,
        size_range: tuple[int, int] | None = None,
    ) -> int:
        """A storage that the last operator asked for; returns its index. `size_range`: where the size is not known for certain."""
        low_bytes, high_bytes = size_range or (num_bytes, num_bytes)
        index = len(self._storage_columns[0])
        row = (num_bytes, low_bytes, high_bytes, category, source, self.num_operators - 1, self.stream)
        for column, value in zip(self._storage_columns, row, strict=True):
            column.append(value)
        self._event(EventKind.ALLOCATE, index)
        return index

    def free(self, storage: int) -> None:
        """The last reference to a storage was dropped."""
        self._event(EventKind.FREE, storage)

    def use(self, storage: int, stream: int) -> None:
        """`Tensor.record_stream`."""
        self._event(EventKind.USE, storage, stream)

    def synchronize(self) -> None:
        """The host waited for the device."""
        self._event(EventKind.SYNCHRONIZE, -1)

    def copy(self, direction: CopyDirection, num_bytes: int, *, is_pinned: bool, is_blocking: bool) -> None:
        """The last operator is a copy between host and card, or between host and disk."""
        # What waits in a thread of the program's own keeps the main one from nothing.
        row = (self.num_operators - 1, direction, is_pinned, is_blocking and not self.is_beside, num_bytes)
        for column, value in zip(self.copies.values(), row, strict=True):
            column.append(value)

    def empty_cache(self) -> None:
        """`torch.cuda.empty_cache`."""
        self._event(EventKind.EMPTY_CACHE, -1)

    def _event(self, kind: int, storage: int, value: int = 0) -> None:
        kinds, storages, operators, values = self._event_columns
        kinds.append(kind)
        storages.append(storage)
        operators.append(self.num_operators)
        values.append(value)

    def span(self, name: str, kind: SpanKind) -> None:
        """Starts the span `name`, which lasts until the next one starts."""
        self.spans.append((name, kind, len(self._event_columns[0]), self.num_operators))

    def assume(self, where: str, what: str) -> None:
        """Notes an assumption, once per place."""
        self.assumptions.setdefault((where, what))


def tape_of(recorder: Recorder, *, target: str, versions: Mapping[str, str], traced_for: str) -> Tape:
    """The trace so far as a tape."""
    ends = [*(begins for _, _, *begins in recorder.spans[1:]), [len(recorder.events["kind"]), recorder.num_operators]]
    kept = [
        (recorder.strings.intern(name), kind, begin, end, (first, last))
        for (name, kind, begin, first), (end, last) in zip(recorder.spans, ends, strict=True)
        if end > begin
    ]
    columns = tuple(zip(*kept, strict=True))[:4] if kept else ((), (), (), ())
    return Tape(
        target=target,
        versions=versions,
        traced_for=traced_for,
        strings=tuple(recorder.strings.texts),
        operators=Operators.from_columns(recorder.operators),
        storages=Storages.from_columns(recorder.storages),
        events=Events.from_columns(recorder.events),
        spans=Spans.from_columns(dict(zip(("name", "kind", "begin", "end"), columns, strict=True))),
        operators_of_steps=tuple(operators for _, kind, _, _, operators in kept if kind == SpanKind.STEP),
        copies=Copies.from_columns(recorder.copies),
        geometry=Geometry.from_rows(recorder.geometry),
        casts=Casts.from_rows(recorder.casts.rows(len(recorder.events["kind"]))),
        waits=Waits.from_columns(recorder.waits.columns),
        collectives=Collectives.from_columns(recorder.communication.collectives),
        rank=recorder.communication.world[0],
        num_ranks=recorder.communication.world[1],
        num_nodes=recorder.communication.world[2],
        communicators=tuple(recorder.communication.groups),
        assumptions=tuple(Assumption(where=where, what=what) for where, what in recorder.assumptions),
        host_peak_bytes=recorder.host.peak_bytes,
        disk_peak_bytes=recorder.disk.peak_bytes,
        left_out=tuple(recorder.left_out),
        memory_fraction=recorder.memory_fraction,
        pinned_peak_bytes=recorder.host.pinned.peak_reserved_bytes,
        pinned_tensor_bytes=recorder.host.pinned.peak_requested_bytes,
        # A program with both a framework's loop and its own has no one loop whose step a plan could split.
        loop=next(iter(recorder.loops)) if len(recorder.loops) == 1 else "",
        module_classes={path: name for path, name in recorder.module_classes.items() if name},
        called_modules=frozenset(recorder.strings.texts[path] for path in recorder.called_modules),
        optimizers=tuple(recorder.optimizers),
    )


class LiveMemory:
    """The simulated allocator, brought up to date when it is queried."""

    def __init__(self, recorder: Recorder, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._recorder = recorder
        # Incremental: a script that logs memory in every step replays each event once.
        self._replay = TapeReplay(CachingAllocator(AllocatorSettings()))
        self._position = 0

    def allocator(self) -> CachingAllocator:
        """The allocator as it is now."""
        kinds, storages, _, values = self._recorder._event_columns
        num_bytes, streams = self._recorder.storages["num_bytes"], self._recorder.storages["stream"]
        while self._position < len(kinds):
            at = self._position
            self._position += 1
            self._replay.feed(kinds[at], storages[at], num_bytes, streams, values[at])
        return self._replay.allocator
