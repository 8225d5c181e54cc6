"""Events of a recording as columns: each is checked and split as it is read, so that millions of them need no object each.

Values that repeat are stored once and numbered: call stacks, the notes on events, and the pairs of a stream and a private memory pool.
"""

import enum
import os
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.int64]

MOST = (1 << 63) - 1
# Of an instruction without a line torch writes -1, signed or not (torch/csrc/profiler/combined_traceback.cpp); of an unknown file, 0.
_LAST_LINE = (1 << 31) - 1
# More than any machine has; a forged file could otherwise ask for millions of tables.
MAX_DEVICES = 1 << 10
DEFAULT_POOL = (0, 0)
_NO_CONTEXT = "N/A"


# The order matters: those up to FREE_COMPLETED are about blocks, and those before OOM have an address (an `oom` event has
# `device_free` in its place).
class Action(enum.IntEnum):
    """The action of an event; `OTHER` is any that concerns no memory, such as `snapshot`."""

    ALLOC = 0
    FREE_REQUESTED = 1
    FREE_COMPLETED = 2
    SEGMENT_ALLOC = 3
    SEGMENT_FREE = 4
    SEGMENT_MAP = 5
    SEGMENT_UNMAP = 6
    OOM = 7
    OTHER = 8


_ACTIONS = {action.name.lower(): action.value for action in Action}
_FIRST_WITHOUT_ADDRESS = Action.OOM.value
_OTHER = Action.OTHER.value


class Malformed(Exception):
    """The data does not have the structure of a recording."""


class Stack:
    """Stands for a list of frames that was read before, by its number."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class Frame:
    """Stands for a frame that was read before, by its text."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


class Lanes:
    """Numbers pairs of a stream and a private pool; a lane is such a number, or the stream itself for the default pool."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, tuple[int, int]], int] = {}

    def pair(self, lane: int) -> tuple[int, tuple[int, int]]:
        """The stream and the pool of a lane."""
        return (lane, DEFAULT_POOL) if lane >= 0 else list(self._numbers)[-1 - lane]

    def of(self, stream: int, pool_id: Any) -> int:
        """The lane of a stream in a pool."""
        if type(pool_id) not in (list, tuple) or len(pool_id) != 2 or not all(type(part) is int for part in pool_id):
            raise Malformed("a pool's id is no pair of whole numbers")
        # Private pools count down from -1, so that streams of the default pool, by far the most frequent, need no table.
        key = (pool_id[0], pool_id[1])
        return stream if key == DEFAULT_POOL else self._numbers.setdefault((stream, key), -1 - len(self._numbers))


class Numbered:
    """Stores each distinct text, or tuple of texts, once; number 0 is the empty one."""

    def __init__(self, empty: Any) -> None:
        self._numbers: dict[Any, int] = {empty: 0}

    def of(self, value: Any) -> int:
        """The number of `value`, new or not."""
        return self._numbers.setdefault(value, len(self._numbers))

    def all(self) -> tuple[Any, ...]:
        """Every value, by number."""
        return tuple(self._numbers)


class Shared:
    """The tables that events of all devices refer to by number: stacks, each from the innermost frame out, and notes."""

    def __init__(self) -> None:
        self.stacks = Numbered(())
        self.notes = Numbered("")
        self._frames: dict[int, tuple[Any, Frame]] = {}
        self._frames_by_text: dict[str, Frame] = {}
        self._here = os.getcwd() + os.sep

    def stack(self, frames: Any) -> int:
        """The number of a stack of frames as torch writes them."""
        if type(frames) is Stack:
            return frames.number
        if not frames and isinstance(frames, list | tuple):
            return 0
        return self.stacks.of(self.texts(frames))

    def texts(self, frames: Any) -> tuple[str, ...]:
        """Each frame as `file.py:LINE function`, the path relative to the working directory where it lies inside."""
        if not isinstance(frames, list | tuple):
            raise Malformed("'frames' is no list")
        # Keyed by identity, as pickle's memo makes a frame one object however often it occurs. The table keeps it alive, so that no
        # other object can get the same id.
        known = self._frames
        return tuple([(known[id(f)][1] if id(f) in known else self._new_frame(f)).text for f in frames])

    def let_go(self, frame: dict[str, Any]) -> Frame | None:
        """Releases a frame dict of a numbered stack and returns its `Frame`; None for any other dict."""
        known = self._frames.pop(id(frame), None)
        return None if known is None else known[1]

    def note(self, text: Any, key: str) -> int:
        """The number of an event's note."""
        if type(text) is not str:
            raise Malformed(f"'{key}' is no text")
        return 0 if text == _NO_CONTEXT else self.notes.of(text)

    def _new_frame(self, frame: Any) -> Frame:
        if type(frame) is Frame:
            return frame
        if type(frame) is not dict:
            raise Malformed("a frame is no dict")
        name, filename, line = frame.get("name"), frame.get("filename"), frame.get("line")
        if type(name) is not str or type(filename) is not str or type(line) is not int:
            raise Malformed("a frame lacks its 'name', 'filename' or 'line'")
        # torch writes "" for a file that the symboliser does not know.
        where = filename.removeprefix(self._here) or "??"
        text = f"{where}:{line if 0 <= line <= _LAST_LINE else 0} {name}"
        known = self._frames_by_text.setdefault(text, Frame(text))
        self._frames[id(frame)] = (frame, known)
        return known


class EventRow:
    """Stands for an event that is in a table already."""

    __slots__ = ("number", "table")

    def __init__(self, table: "EventTable", number: int) -> None:
        self.table = table
        self.number = number


class EventTable:
    """Collects the events of one device into columns. `number` identifies it among the tables of its file."""

    def __init__(self, shared: Shared, number: int = 0) -> None:
        self.shared = shared
        self.number = number
        self.lanes = Lanes()
        self._columns = {name: array("q") for name in ("action", "address", "num_bytes", "lane", "time_us", "stack")}
        self._columns |= {name: array("q") for name in ("user_metadata", "compile_context")}
        self.free_bytes_at_oom: dict[int, int] = {}
        # Bound once: looking eight methods up for each of millions of events takes longer than the appends.
        self._append = tuple(column.append for column in self._columns.values())

    def __len__(self) -> int:
        return len(self._columns["action"])

    def add(self, event: Any) -> None:
        """Appends one event.

        Raises:
            Malformed: it lacks something, or a figure is out of range.
        """
        # Almost every event is a dict; an EventRow is an event that the file refers to a second time.
        if type(event) is not dict:
            self._add_again(event)
            return
        get = event.get
        name = get("action")
        if type(name) is not str:
            raise Malformed("an event has no 'action'")
        action = _ACTIONS.get(name, _OTHER)
        address = get("addr") if action < _FIRST_WITHOUT_ADDRESS else 0
        num_bytes, stream, time_us = get("size", 0), get("stream", 0), get("time_us", 0)
        if not (
            # `type(...) is int` and not isinstance: True is an int too, and a forged file may hold it.
            type(address) is type(num_bytes) is type(stream) is type(time_us) is int
            and 0 <= address <= MOST
            and 0 <= num_bytes <= MOST
            and 0 <= stream <= MOST
            and 0 <= time_us <= MOST
        ):
            raise _wrong_figure({"addr": address, "size": num_bytes, "stream": stream, "time_us": time_us})
        pool_id = get("pool_id", DEFAULT_POOL)
        shared, frames = self.shared, get("frames")
        user_metadata, compile_context = get("user_metadata", ""), get("compile_context", "")
        add_action, add_address, add_bytes, add_lane, add_time, add_stack, add_metadata, add_context = self._append
        if action == _FIRST_WITHOUT_ADDRESS:
            self._note_failure(get("device_free"))
        add_lane(stream if pool_id == DEFAULT_POOL else self.lanes.of(stream, pool_id))
        add_stack(shared.stack(frames) if frames is not None else 0)
        add_metadata(shared.note(user_metadata, "user_metadata") if user_metadata != "" else 0)
        add_context(shared.note(compile_context, "compile_context") if compile_context != "" else 0)
        add_action(action)
        add_address(address)
        add_bytes(num_bytes)
        add_time(time_us)

    def _note_failure(self, free_bytes: Any) -> None:
        if free_bytes is None:
            return
        if type(free_bytes) is not int or not 0 <= free_bytes <= MOST:
            raise _wrong_figure({"device_free": free_bytes})
        self.free_bytes_at_oom[len(self)] = free_bytes

    def _add_again(self, row: Any) -> None:
        if type(row) is not EventRow:
            raise Malformed("an event is no dict")
        for name, column in self._columns.items():
            column.append(row.table._columns[name][row.number])
        if row.number in row.table.free_bytes_at_oom:
            self.free_bytes_at_oom[len(self) - 1] = row.table.free_bytes_at_oom[row.number]
        self._columns["lane"][-1] = self.lanes.of(*row.table.lanes.pair(self._columns["lane"][-1]))

    def stack_of(self, row: int) -> int:
        """The number of the stack of an event."""
        return self._columns["stack"][row]

    def columns(self) -> dict[str, Column]:
        """The columns by name, of equal length; nothing can be added after this."""
        return {name: np.frombuffer(column, dtype=np.int64) for name, column in self._columns.items()}


def _wrong_figure(figures: dict[str, Any]) -> Malformed:
    wrong = [key for key, value in figures.items() if type(value) is not int or not 0 <= value <= MOST]
    return Malformed(f"'{wrong[0]}' is missing or no whole number from 0 to 2**63 - 1")


def table_of(events: Sequence[Any], shared: Shared) -> EventTable:
    """The columns of events that are still a plain list."""
    table = EventTable(shared)
    for event in events:
        table.add(event)
    return table
