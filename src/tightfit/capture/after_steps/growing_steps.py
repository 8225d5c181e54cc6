"""Whether each training step leaves more allocated than the one before: a list of outputs, a sum of losses with their graphs. The steps that were traced fit then,
and a later one may not.

A program grows where storages of one size, made at one line, are alive that were born in each of the last three steps, and as much more is allocated after each:
names that the next turn binds anew hold those of one step or two, a prefetcher as many batches after each step. It grows too where the largest storage that a line
makes is larger by as much in each of these steps, and is kept: `history = torch.cat([history, new])`.
"""

import collections
import itertools
from collections.abc import Sequence, Set

import numpy as np

from tightfit.capture.observe.recorder import Recorder
from tightfit.tape import EventKind, NotReached, SpanKind
from tightfit.units import format_bytes

_NUM_STEPS = 3
_MIN_GROWTH_BYTES = 1024
_MIN_SHARE = 0.9


def growth_of_steps(recorder: Recorder, alive: Sequence[int], place: str) -> NotReached | None:
    """What later steps of the loop at `place` leave, if those that were traced left more and more; `alive` are the storages that are alive now."""
    spans = recorder.spans
    steps = [number for number, (_, kind, *_) in enumerate(spans) if kind == SpanKind.STEP][-_NUM_STEPS:]
    if len(steps) < _NUM_STEPS:
        return None
    ends = [span[2:] for span in spans[1:]] + [(len(recorder.events["kind"]), recorder.num_operators)]
    columns = recorder.storages
    left: list[collections.Counter[tuple[int, int]]] = []
    for number in steps:
        begin, end = spans[number][3], ends[number][1]
        left.append(
            collections.Counter(
                (columns["num_bytes"][index], int(recorder.operators["line"][columns["operator"][index]]))
                for index in alive
                if begin <= columns["operator"][index] < end
            )
        )
    of_each = {key: min(counts[key] for counts in left) for key in left[0]}
    growth = sum(num_bytes * count for (num_bytes, _), count in of_each.items())
    after = _alive_bytes(recorder)[[ends[number][0] for number in steps]]
    if growth >= _MIN_GROWTH_BYTES:
        _, line = max(of_each, key=lambda key: key[0] * of_each[key])
    else:
        growth, line = _growth_of_one(
            recorder, {line for _, line in left[-1]}, [(spans[number][3], ends[number][1]) for number in steps]
        )
    if growth < _MIN_GROWTH_BYTES or (np.diff(after) < _MIN_SHARE * growth).any():
        return None
    what = f"each leaves {format_bytes(growth)} more allocated, made at {recorder.strings.texts[line]}"
    return NotReached(what=f"steps after the first {len(steps)}", where=place, condition=what)


def _growth_of_one(recorder: Recorder, lines: Set[int], steps: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """By how much the largest storage that one of `lines` makes grows in each of `steps` (ranges of operators), and the line; 0 where none does."""
    columns = recorder.storages
    operators = np.asarray(columns["operator"])
    of_each: list[dict[int, int]] = []
    for begin, end in steps:
        largest: dict[int, int] = {}
        for index in np.nonzero((operators >= begin) & (operators < end))[0].tolist():
            line = int(recorder.operators["line"][operators[index]])
            largest[line] = max(largest.get(line, 0), columns["num_bytes"][index])
        of_each.append(largest)
    grown = [(0, 0)]
    for line in lines:
        growth = {after.get(line, 0) - before.get(line, 0) for before, after in itertools.pairwise(of_each)}
        grown += [(growth.pop(), line)] if len(growth) == 1 else []
    return max(grown)


def _alive_bytes(recorder: Recorder) -> np.ndarray:
    """The bytes that are allocated before each event, and after the last."""
    kinds, storages = np.asarray(recorder.events["kind"]), np.asarray(recorder.events["storage"])
    signs = (kinds == EventKind.ALLOCATE).astype(np.int64) - (kinds == EventKind.FREE)
    sizes = np.asarray(recorder.storages["num_bytes"], dtype=np.int64)[
        np.where(signs != 0, storages, 0).astype(np.int64)
    ]
    return np.concatenate([[0], np.cumsum(signs * sizes)])
