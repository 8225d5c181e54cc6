"""Reads a recording's pickle without ever holding its events: each batch goes into columns as soon as it is appended to the list of events.

Memo entries that are no longer needed are released, repeated values are stored once, and a call stack, which is a list of some dozen references
to frames, is recognised by its bytes when it occurs again. That skips most of the opcodes of a large file.
"""

import re
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Any

from tightfit.recordings.events import MAX_DEVICES, EventRow, EventTable, Frame, Malformed, Shared, Stack
from tightfit.recordings.plain_pickle import GONE, PlainValue, Reader, load, memoise

# MARK, then BINGET or LONG_BINGET for each frame, then APPENDS: a stack whose frames were all memoised before.
_RUN = re.compile(rb"\((?:h.|j.{4}){2,999}+e", re.DOTALL)
# The same in protocol 0: GET and APPEND for each frame, then the SETITEM of the event's dict.
_TEXT_RUN = re.compile(rb"(?:g\d{1,9}\na){2,}+s")
_MEMO_LINE = re.compile(rb"p(\d{1,9})\n")
_LONGEST_RUN_BYTES = 1 << 14
# The byte of APPENDS can also be part of a memo index, so the first hit need not be the end of the run.
_NUM_ENDS_TRIED = 8
_LONGEST_KEPT = 255
# A table's number and a row in it share one 64-bit integer.
_ROW_BITS = 40


class EventList(list[Any]):
    """A list of the file; if its items are events, it stays empty and they are in `table`."""

    __slots__ = ("table",)

    def __init__(self) -> None:
        super().__init__()
        self.table: EventTable | None = None


def load_recording(
    read: Callable[[int], bytes], shared: Shared, advance: Callable[[int], None] | None = None
) -> PlainValue:
    """The recording as plain data, except that lists are `EventList` and stacks may be `Stack` of `shared`.

    Raises:
        NotPlain: it is damaged, or no plain data.
        Malformed: an event is not as a recording has it.
    """
    return load(_RecordingReader(read, shared, advance))


class _StackRuns:
    """The stacks by the bytes that make them, as long as no memo entry changes; None for bytes that make no stack."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._runs: dict[bytes, Stack | None] = {}
        self._stacks: dict[int, Stack] = {}

    def get(self, run: bytes) -> Stack | None:
        """The stack that a run makes; None if it is not known, or none."""
        return self._runs.get(run)

    def clear(self) -> None:
        """Forgets all runs."""
        self._runs.clear()

    def known(self, data: bytes, begin: int, end_mark: bytes) -> bytes:
        """The run from `begin`, if it occurred before: the same bytes at an opcode boundary mean the same run, so it need not be parsed again."""
        end = begin
        for _ in range(_NUM_ENDS_TRIED):
            end = data.find(end_mark, end + 1, begin + _LONGEST_RUN_BYTES)
            run = data[begin : end + len(end_mark)]
            if end < 0 or run in self._runs:
                return run if end >= 0 else b""
        return b""

    def learn(self, found: re.Match[bytes] | None, memo: list[Any]) -> bytes:
        """Remembers which stack a list of references is, or that it is none because not all of them are frames."""
        if found is None:
            return b""
        run = found.group()
        frames = [memo[index] for index in _references(run)]
        is_stack = all(type(frame) is Frame or (type(frame) is dict and "filename" in frame) for frame in frames)
        self._runs[run] = self.stack(self._shared.stack(frames)) if is_stack else None
        return run

    def stack(self, number: int) -> Stack:
        """The stack of a number, one object for each."""
        return self._stacks.setdefault(number, Stack(number))


class _RecordingReader(Reader):
    """`_gone_at` are the memo entries that were events, ascending, and `_gone_rows` the table and the row of each."""

    def __init__(
        self, read: Callable[[int], bytes], shared: Shared, advance: Callable[[int], None] | None = None
    ) -> None:
        super().__init__(read, advance)
        self._shared = shared
        self._runs = _StackRuns(shared)
        self._texts: dict[str, str] = {}
        self._pairs: dict[tuple[int, int], tuple[int, int]] = {}
        self._tables: list[EventTable] = []
        self._num_swept = 0
        self._gone_at = array("q")
        self._gone_rows = array("q")

    def new_list(self) -> list[Any]:
        """A list that may turn out to hold events."""
        return EventList()

    def open_list(self) -> None:
        """Pushes a new list, or a whole stack at once where the bytes are those of one."""
        data, at = self.window.data, self.window.at
        # EMPTY_LIST is followed by MEMOIZE (protocol 4), BINPUT or LONG_BINPUT, of 1, 2 and 5 bytes, or by nothing.
        memo_op = data[at]
        begin = at + (1 if memo_op == 0x94 else 2 if memo_op == 0x71 else 5 if memo_op == 0x72 else 0)
        if data[begin] == 0x28 and data[begin + 1] in b"hj":
            run = self._runs.known(data, begin, b"e") or self._runs.learn(_RUN.match(data, begin), self.memo)
            stack = self._runs.get(run)
            if stack is not None:
                self.stack.append(stack)
                if begin > at:
                    self._memoise(memo_op, data, at)
                self.window.at = begin + len(run)
                return
        super().open_list()

    def close_list(self, items: list[Any]) -> None:
        """Pushes a list of `items`, or a whole stack: protocol 0 makes an empty list by MARK and LIST, and appends frame by frame."""
        data = self.window.data
        memo_line = _MEMO_LINE.match(data, self.window.at)
        if not items and memo_line is not None:
            begin = memo_line.end()
            run = self._runs.known(data, begin, b"\nas") or self._runs.learn(_TEXT_RUN.match(data, begin), self.memo)
            stack = self._runs.get(run)
            if stack is not None:
                self.stack.append(stack)
                memoise(self, int(memo_line[1]))
                self.window.at = begin + len(run) - 1
                return
        super().close_list(items)

    def _memoise(self, op: int, data: bytes, at: int) -> None:
        if op == 0x94:
            self.memo.append(self.stack[-1])
        else:
            memoise(self, data[at + 1] if op == 0x71 else int.from_bytes(data[at + 1 : at + 5], "little"))

    def forget_runs(self) -> None:
        """Forgets the known runs, as an entry that they refer to may have changed."""
        self._runs.clear()

    def append(self, items: list[Any]) -> None:
        """Adds `items` to the list on top of the stack, or to its table if they are events."""
        target = self.stack[-1]
        if type(target) is not EventList:
            raise Malformed("something is appended to what is no list")
        if target.table is None and not target and items and _is_event(items[0]):
            target.table = EventTable(self._shared, number=len(self._tables))
            self._tables.append(target.table)
            if len(self._tables) > MAX_DEVICES:
                raise Malformed(f"it has more than {MAX_DEVICES} lists of events")
        if target.table is None:
            target.extend(items)
        else:
            self._take_in(target.table, items)

    def _take_in(self, table: EventTable, events: list[Any]) -> None:
        """Appends events to their table, and replaces them in the memo by their place in it."""
        first = (table.number << _ROW_BITS) + len(table)
        add = table.add
        for event in events:
            add(event)
        rows = {id(event): row for row, event in enumerate(events, first)}
        lists = {}
        for row, event in enumerate(events, len(table) - len(events)):
            frames = event.get("frames") if type(event) is dict else None
            if type(frames) is EventList:
                lists[id(frames)] = self._runs.stack(table.stack_of(row))
        memo = self.memo
        # Only entries since the last batch: the memo grows to many millions and is swept once over the whole file.
        for at in range(self._num_swept, len(memo)):
            value = memo[at]
            if type(value) is dict and id(value) in rows:
                memo[at] = GONE
                self._gone_at.append(at)
                self._gone_rows.append(rows[id(value)])
                self.containers.num -= 1
            elif type(value) is dict and (frame := self._shared.let_go(value)) is not None:
                memo[at] = frame
                self.containers.num -= 1
            elif type(value) is EventList and id(value) in lists:
                memo[at] = lists[id(value)]
                self.containers.num -= 1
        self._num_swept = len(memo)

    def recall(self, index: int) -> Any:
        """The `EventRow` of an event that is referred to after it went into its table."""
        at = bisect_left(self._gone_at, index)
        if at == len(self._gone_at) or self._gone_at[at] != index:
            return super().recall(index)
        row = self._gone_rows[at]
        return EventRow(self._tables[row >> _ROW_BITS], row & (1 << _ROW_BITS) - 1)

    def push_tuple(self, items: list[Any]) -> None:
        """Pushes a tuple; pairs of numbers (the `pool_id` of every event) are stored once."""
        if len(items) == 2 and type(items[0]) is int and type(items[1]) is int:
            pair = (items[0], items[1])
            self.stack.append(self._pairs.setdefault(pair, pair))
        else:
            super().push_tuple(items)

    def text(self, data: bytes) -> str:
        """Decodes a text; short ones are stored once."""
        text = super().text(data)
        return self._texts.setdefault(text, text) if len(data) <= _LONGEST_KEPT else text


def _references(run: bytes) -> Iterator[int]:
    """The memo indices that a run refers to."""
    if run.startswith(b"g"):
        yield from (int(line) for line in run[1:-2].split(b"\nag"))
        return
    at = 1
    while at < len(run) - 1:
        width = 1 if run[at] == 0x68 else 4
        yield int.from_bytes(run[at + 1 : at + 1 + width], "little")
        at += 1 + width


def _is_event(value: Any) -> bool:
    return type(value) is EventRow or (type(value) is dict and "action" in value)
