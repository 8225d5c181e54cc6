"""The allocated peak of a memory recording, from nothing but the recording.

The recorded addresses say which block served each request, so the size that counts (the block's, which exceeds the
rounded request where the rest was too small to split off) follows without any allocation policy. This is kept apart
from the package that it judges.
"""

import bisect
import pickle
from pathlib import Path
from typing import Any, NoReturn

MIB = 1 << 20


class _PlainUnpickler(pickle.Unpickler):
    """A recording is a pickle of plain containers; one that names a class could run code."""

    def find_class(self, module_name: str, global_name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"the recording asks for {module_name}.{global_name}; only plain data is read")


class _Segments:
    """The blocks of every mapped segment: start -> (size, is free, is of the small pool)."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.blocks: dict[int, tuple[int, bool, bool]] = {}
        self.bounds: set[int] = set()

    def put(self, start: int, size: int, is_free: bool, is_small: bool) -> None:
        """Adds a block or replaces the one at `start`."""
        if start not in self.blocks:
            bisect.insort(self.starts, start)
        self.blocks[start] = (size, is_free, is_small)

    def drop(self, start: int) -> None:
        """Forgets the block at `start`."""
        del self.blocks[start]
        del self.starts[bisect.bisect_left(self.starts, start)]

    def take(self, start: int, size: int) -> int:
        """Takes `size` bytes from the front of the free block at `start`; the bytes that are then in use.

        What is left stays free if it has 512 bytes (small pool) or more than 1 MiB (large pool), else it goes along
        (c10/cuda/CUDACachingAllocator.cpp, should_split).
        """
        whole, _, is_small = self.blocks[start]
        rest = whole - size
        if rest >= 512 if is_small else rest > MIB:
            self.put(start, size, False, is_small)
            self.put(start + size, rest, True, is_small)
            return size
        self.put(start, whole, False, is_small)
        return whole

    def give_back(self, start: int) -> int:
        """Frees the block at `start` and merges it with free neighbours of its segment; the bytes it had."""
        size, _, is_small = self.blocks[start]
        place = bisect.bisect_left(self.starts, start)
        first, total = start, size
        if start + size not in self.bounds and self._is_free(start + size):
            total += self.blocks[start + size][0]
            self.drop(start + size)
        if start not in self.bounds and place and self._is_free(self.starts[place - 1]):
            first = self.starts[place - 1]
            total += self.blocks[first][0]
            self.drop(start)
        self.put(first, total, True, is_small)
        return size

    def _is_free(self, start: int) -> bool:
        return start in self.blocks and self.blocks[start][1]

    def map(self, start: int, size: int) -> None:
        """A new segment: one free block."""
        self.bounds.add(start)
        self.put(start, size, True, size == 2 * MIB)


def _rounded(size: int) -> int:
    return max(512, -(-size // 512) * 512)


def _initial(recording: dict[str, Any], events: list[dict[str, Any]]) -> tuple[_Segments, int]:
    """The blocks before the first event, and the bytes in use: the final segments with the events undone."""
    used = {}
    segments = {segment["address"]: segment["total_size"] for segment in recording["segments"]}
    for segment in recording["segments"]:
        address = segment["address"]
        for block in segment["blocks"]:
            start = block.get("address", address)
            address = start + block["size"]
            if block["state"] != "inactive":
                used[start] = block["size"]
    for event in reversed(events):
        match event["action"]:
            case "alloc":
                used.pop(event["addr"])
            case "free_completed":
                used[event["addr"]] = _rounded(event["size"])
            case "segment_alloc":
                del segments[event["addr"]]
            case "segment_free":
                segments[event["addr"]] = event["size"]
    state, ordered = _Segments(), sorted(used)
    for start, size in segments.items():
        state.map(start, size)
        is_small = state.blocks[start][2]
        state.drop(start)
        position = start
        for taken in ordered[bisect.bisect_left(ordered, start) : bisect.bisect_left(ordered, start + size)]:
            _fill(state, position, taken, is_small)
            state.put(taken, used[taken], False, is_small)
            position = taken + used[taken]
        _fill(state, position, start + size, is_small)
    return state, sum(size for size, is_free, _ in state.blocks.values() if not is_free)


def _fill(state: _Segments, start: int, end: int, is_small: bool) -> None:
    """The gap from `start` to `end`: a free block, or the tail of the block before it where it is too small for one.

    A block that is freed during the recording and was allocated before it has only its rounded request recorded.
    """
    if start == end:
        return
    before = state.starts[bisect.bisect_left(state.starts, start) - 1] if state.starts else -1
    if (
        not is_small
        and end - start <= MIB
        and before in state.blocks
        and sum((before, state.blocks[before][0])) == start
    ):
        state.put(before, end - before, False, is_small)
    else:
        state.put(start, end - start, True, is_small)


def peak_allocated_bytes(path: Path) -> int:
    """The most bytes in use at once on the first device that the recording at `path` has events of.

    Raises:
        pickle.UnpicklingError: the file is not plain data.
    """
    with path.open("rb") as file:
        recording = _PlainUnpickler(file).load()
    events = next(trace for trace in recording["device_traces"] if trace)
    state, in_use = _initial(recording, events)
    peak = in_use
    for event in events:
        match event["action"]:
            case "alloc":
                in_use += state.take(event["addr"], _rounded(event["size"]))
                peak = max(peak, in_use)
            case "free_completed":
                in_use -= state.give_back(event["addr"])
            case "segment_alloc":
                state.map(event["addr"], event["size"])
            case "segment_free":
                state.bounds.discard(event["addr"])
                state.drop(event["addr"])
    return peak
