"""The planner's problem: which options to take so that no time step of the run exceeds the budget, at the least extra time.

A run has as many time steps as events, and most of them can never be the peak. Between two events at which a change of any option begins or ends,
only the highest time step matters; of ranges that all options change alike, only the highest; and none whose worst case is below what every
choice leaves somewhere else. The few hundred that remain are equivalent to all.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from tightfit.planner.option import Option
from tightfit.planner.sides import Sides

Bytes = npt.NDArray[np.int64]

# An option that saves less than 1/MIN_WORTH of the peak only adds noise to a plan, where all of its equivalence class together save less than 1/MIN_WORTH_OF_ALIKE.
MIN_WORTH = 2000
MIN_WORTH_OF_ALIKE = 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """`base_bytes`, shape (time steps,), are the allocated bytes without options; row `i` of `changes`, shape (options, time steps), is what
    option `i` adds to them. At most one option of each of the `conflicts`, which list indices, is taken. `events` has the event of each time step.
    All options taken together may move `host_bytes` to the host and `disk_bytes` to disk. `step` are the sides of a step without any of them.
    """

    options: tuple[Option, ...]
    base_bytes: Bytes
    changes: Bytes
    events: Bytes
    conflicts: tuple[tuple[int, ...], ...]
    host_bytes: int = 0
    disk_bytes: int = 0
    step: Sides = Sides()

    def sides(self) -> npt.NDArray[np.float64]:
        """What each option adds to the card's side and to the host's in seconds, shape (2, options)."""
        added = [option.added_sides for option in self.options]
        return np.array([[each.on_card for each in added], [each.on_host for each in added]], dtype=np.float64)

    def seconds_of(self, chosen: Iterable[int]) -> float:
        """What a step takes longer with the options `chosen` together."""
        return self.step.added(together(self.options[index] for index in chosen))

    def moved(self) -> list[tuple[str, int, list[int]]]:
        """The other tiers: the name, the capacity, and the bytes that each option moves there."""
        return [
            ("the host", self.host_bytes, [option.host_bytes for option in self.options]),
            ("disk", self.disk_bytes, [option.disk_bytes for option in self.options]),
        ]

    def moved_bytes(self, chosen: Iterable[int]) -> int:
        """What the options `chosen` move to other tiers."""
        return sum(self.options[index].host_bytes + self.options[index].disk_bytes for index in chosen)

    def timeline(self, chosen: Iterable[int]) -> Bytes:
        """Allocated bytes at each time step with the options `chosen`."""
        return self.base_bytes + self.changes[list(chosen)].sum(axis=0, dtype=np.int64)

    def peak_bytes(self, chosen: Iterable[int]) -> int:
        """The peak with the options `chosen`."""
        return int(self.timeline(chosen).max(initial=0))


def build(
    timeline: Bytes, options: Sequence[Option], *, host_bytes: int = 0, disk_bytes: int = 0, step: Sides | None = None
) -> Problem:
    """The problem of a run with the memory `timeline`, bytes after each event, shape (events,), and its options.

    An option whose changes lie outside of the events, or are not finite, is a bug of its technique, and fails an assertion.
    """
    num_events = len(timeline)
    for option in options:
        assert np.isfinite(option.seconds), option.key
        assert all(0 <= c.begin <= c.end <= num_events for c in option.changes), option.key
    borders = np.unique([0, *(b for o in options for c in o.changes for b in (c.begin, c.end) if b < num_events)])
    starts = borders.astype(np.int64)
    # Between two borders every option changes all events alike, so the highest of them stands for the range.
    highest = np.maximum.reduceat(timeline, starts) if num_events else np.zeros(1, dtype=np.int64)
    steps = [_steps(option, starts) for option in options]
    # Dropped before the matrix is made: it has a row for each of some hundred options.
    matters = _can_be_the_peak(highest, steps)
    changes = np.zeros((len(options), int(matters.sum())), dtype=np.int64)
    for row, differences in zip(changes, steps, strict=True):
        row[:] = np.cumsum(differences)[matters]
    useful = _useful(options, changes, int(timeline.max(initial=0)))
    options, changes = [options[i] for i in useful], changes[useful]
    kept = _highest_of_equals(highest[matters], changes)
    ends = np.append(starts[1:], num_events)
    ranges = np.flatnonzero(matters)[kept]
    events = [int(starts[i] + timeline[starts[i] : ends[i]].argmax()) if num_events else 0 for i in ranges.tolist()]
    return Problem(
        options=tuple(options),
        base_bytes=highest[matters][kept],
        changes=np.ascontiguousarray(changes[:, kept]),
        events=np.array(events, dtype=np.int64),
        conflicts=_conflicts(options),
        host_bytes=host_bytes,
        disk_bytes=disk_bytes,
        step=step or Sides(),
    )


def with_taken(problem: Problem, taken: Sequence[Option]) -> Problem:
    """An approximation of the problem after `taken`, which need not be among its options: their changes are added to the timeline, options that
    share a slot with them are dropped, and where they save, the others keep the residual share of their savings."""
    saved = np.zeros_like(problem.base_bytes)
    for change in (change for option in taken for change in option.changes):
        saved -= np.where((change.begin <= problem.events) & (problem.events < change.end), change.num_bytes, 0)
    slots = frozenset(slot for option in taken for slot in option.slots)
    left = [i for i, option in enumerate(problem.options) if not option.slots & slots]
    # Where `taken` adds memory (recomputation in backward), the others save what they did before.
    share = np.where(saved > 0, min((option.leaves_share for option in taken), default=1.0), 1.0)
    changes = problem.changes[left]
    options = tuple(problem.options[i] for i in left)
    return dataclasses.replace(
        problem,
        options=options,
        base_bytes=problem.base_bytes - saved,
        changes=np.where(changes < 0, changes * share, changes).astype(np.int64),
        conflicts=_conflicts(options),
        step=problem.step + together(taken),
    )


def without(problem: Problem, keys: Collection[str]) -> Problem:
    """The problem without the options of these keys."""
    left = [i for i, option in enumerate(problem.options) if option.key not in keys]
    options = tuple(problem.options[i] for i in left)
    return dataclasses.replace(problem, options=options, changes=problem.changes[left], conflicts=_conflicts(options))


def together(options: Iterable[Option]) -> Sides:
    """What `options` add to each side of a step."""
    return sum((option.added_sides for option in options), Sides())


def parts_of(step: Sides, options: Sequence[Option]) -> list[float]:
    """The part of each of `options` in what they add together to a step: on the side that is the slower one then, less its share of what that side has to spare."""
    added = together(options)
    after = step + added
    on_card = after.on_card >= after.on_host
    own = [option.added_sides.on_card if on_card else option.added_sides.on_host for option in options]
    spare = sum(own) - step.added(added)
    share = spare / (sum(max(0.0, seconds) for seconds in own) or 1.0)
    return [seconds - share * max(0.0, seconds) for seconds in own]


def total_changes(num_events: int, options: Iterable[Option]) -> Bytes:
    """What `options` together add after each event, shape (events,)."""
    steps = np.zeros(num_events + 1, dtype=np.int64)
    for change in (change for option in options for change in option.changes):
        steps[change.begin] += change.num_bytes
        steps[change.end] -= change.num_bytes
    return np.cumsum(steps[:-1])


def _steps(option: Option, starts: Bytes) -> Bytes:
    """The changes as differences from range to range."""
    steps = np.zeros(len(starts) + 1, dtype=np.int64)
    for change in option.changes:
        # A change that ends with the run falls into the extra slot, which is dropped.
        steps[np.searchsorted(starts, change.begin)] += change.num_bytes
        steps[np.searchsorted(starts, change.end)] -= change.num_bytes
    return steps[:-1]


def _can_be_the_peak(highest: Bytes, steps: Sequence[Bytes]) -> npt.NDArray[np.bool_]:
    # Each option's best and worst case, with conflicts ignored: a weaker bound, so no time step is dropped wrongly.
    least, most = highest.copy(), highest.copy()
    for step in steps:
        change = np.cumsum(step)
        least += np.minimum(change, 0)
        most += np.maximum(change, 0)
    return most >= least.max(initial=0)


def _useful(options: Sequence[Option], changes: Bytes, peak_bytes: int) -> list[int]:
    """The options that can be part of an optimum: those worth something that no other option with the same slots dominates."""
    saved = -changes.min(axis=1, initial=0)
    alike: Counter[str] = Counter()
    for option, num_bytes in zip(options, saved.tolist(), strict=True):
        alike[option.equivalence_class] += num_bytes if option.equivalence_class else 0
    worth = [
        i
        for i, o in enumerate(options)
        if _saves_time(o)
        or saved[i] * MIN_WORTH >= peak_bytes
        or (saved[i] and alike[o.equivalence_class] * MIN_WORTH_OF_ALIKE >= peak_bytes)
    ]
    places: dict[tuple[str, frozenset[str]], list[int]] = {}
    for index in worth:
        places.setdefault((options[index].where, options[index].slots), []).append(index)
    beaten = set()
    for members in places.values():
        # Without slots both can be taken together, so neither replaces the other.
        for one, other in itertools.permutations(members if options[members[0]].slots else (), 2):
            is_equal = _costs(options[one]) == _costs(options[other]) and (changes[one] == changes[other]).all()
            if (
                _is_no_slower(options[one], options[other])
                and (changes[one] <= changes[other]).all()
                # One that is slower may be taken for the sake of another tier's budget, and what moves more elsewhere may be more than there is room for.
                and options[one].host_bytes <= options[other].host_bytes
                and options[one].disk_bytes <= options[other].disk_bytes
                and not (is_equal and one > other)
            ):
                beaten.add(other)
    return [index for index in worth if index not in beaten]


def _costs(option: Option) -> tuple[Sides, int, int]:
    return option.added_sides, option.host_bytes, option.disk_bytes


def _saves_time(option: Option) -> bool:
    return min(option.added_sides.on_card, option.added_sides.on_host) < 0


def _is_no_slower(one: Option, other: Option) -> bool:
    first, second = one.added_sides, other.added_sides
    return first.on_card <= second.on_card and first.on_host <= second.on_host


def _highest_of_equals(highest: Bytes, changes: Bytes) -> npt.NDArray[np.int64]:
    """The highest time step of each set that every option changes alike."""
    if not len(changes):
        return np.array([highest.argmax()], dtype=np.int64)
    best: dict[bytes, int] = {}
    for at, column in enumerate(np.ascontiguousarray(changes.T)):
        key = column.tobytes()
        if key not in best or highest[at] > highest[best[key]]:
            best[key] = at
    return np.array(sorted(best.values()), dtype=np.int64)


def _conflicts(options: Sequence[Option]) -> tuple[tuple[int, ...], ...]:
    members: dict[str, list[int]] = {}
    for index, option in enumerate(options):
        for slot in option.slots:
            members.setdefault(slot, []).append(index)
    # A clique inside of a larger one says nothing new, and fewer rows make the program easier.
    distinct = sorted({tuple(group) for group in members.values() if len(group) > 1}, key=len, reverse=True)
    kept: list[frozenset[int]] = []
    for group in map(frozenset, distinct):
        if not any(group <= larger for larger in kept):
            kept.append(group)
    return tuple(sorted(tuple(sorted(group)) for group in kept))
