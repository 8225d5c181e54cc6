"""Symmetry breaking among equivalent places: rows that leave the solver one of several choices which are the same but for their order.

Of two places with the same options the earlier one mostly saves for longer, so whatever is chosen at the later one can as well be chosen at the earlier one. Mostly: what an
option holds while its own block runs (tiles, an input that is kept) is somewhere else for each place, and two models, or two passes of one, do not save in turn. So it
is compared over all time steps of the problem, and a row is made only where the exchange never holds more.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from tightfit.planner.problem import Bytes, Problem

FREE = 1e30
"""HiGHS treats bounds beyond 1e20 as infinite (option infinite_bound)."""
_SAME_SECONDS = 1e-9


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """`low` <= the sum of `weights` times the options <= `high`."""

    low: float
    high: float
    weights: dict[int, float]


def order_rows(problem: Problem) -> list[Row]:
    """Rows between neighbours of one equivalence class: an option taken at the later place implies one that saves at least as much at the earlier one."""
    saved = -problem.changes.min(axis=1)
    places: dict[str, list[int]] = {}
    for index, option in enumerate(problem.options):
        if option.equivalence_class and option.changes:
            places.setdefault(option.where, []).append(index)
    equivalent: dict[tuple[tuple[str, int], ...], list[list[int]]] = {}
    for members in places.values():
        # Only places with the same options, saving the same, may be exchanged.
        members.sort(key=lambda i: (problem.options[i].equivalence_class, saved[i]))
        kind = tuple((problem.options[i].equivalence_class, int(saved[i])) for i in members)
        equivalent.setdefault(kind, []).append(members)
    groups = [group for group in equivalent.values() if len(group) > 1]
    conflicts = _conflicts(problem) if groups else []
    rows: list[Row] = []
    for group in groups:
        # In the order of the forward pass: earlier layers keep their activations longest.
        group.sort(key=lambda members: min(c.begin for c in problem.options[members[0]].changes))
        for earlier, later in itertools.pairwise(group):
            rows += _Exchange(problem, conflicts, saved, earlier, later).rows()
    return rows


def _conflicts(problem: Problem) -> list[set[int]]:
    """By the index of each option, those that are not chosen with it."""
    found: list[set[int]] = [set() for _ in problem.options]
    for group in problem.conflicts:
        for index in group:
            found[index].update(group)
    return found


class _Exchange:
    """The choices at two places, exchanged; `earlier` and `later` have the options of each in the same order."""

    def __init__(
        self,
        problem: Problem,
        conflicts: Sequence[set[int]],
        saved: Bytes,
        earlier: Sequence[int],
        later: Sequence[int],
    ) -> None:
        self._problem, self._conflicts, self._saved = problem, conflicts, saved
        self._earlier, self._later = list(earlier), list(later)
        # What the later place holds more than the earlier one, with each option.
        self._more = problem.changes[self._later] - problem.changes[self._earlier]

    def rows(self) -> Iterator[Row]:
        """One for each level of savings at which the exchange is never worse."""
        if not all(map(self._costs_alike, self._earlier, self._later)):
            return
        saved = self._saved[self._later]
        levels = [int(level) for level in np.unique(saved) if self._is_no_worse(saved >= level)]
        # Where one of these is chosen the exchange may not be possible, as with an option of a module around one place alone.
        others = self._in_the_way() if levels else set()
        for level in levels:
            reaches = np.flatnonzero(saved >= level).tolist()
            weights = dict.fromkeys(others, 1.0) | {self._earlier[k]: 1.0 for k in reaches}
            yield Row(0.0, FREE, weights | {self._later[k]: -1.0 for k in reaches})

    def _costs_alike(self, one: int, other: int) -> bool:
        first, second = self._problem.options[one], self._problem.options[other]
        off = first.added_sides - second.added_sides
        return (
            max(abs(off.on_card), abs(off.on_host)) <= _SAME_SECONDS
            and first.host_bytes == second.host_bytes
            and first.disk_bytes == second.disk_bytes
        )

    def _is_no_worse(self, reaches: np.ndarray) -> bool:
        """Whether options at the later place, one of which `reaches` the level, and at the earlier one, none of which does, hold no more when they are exchanged."""
        none = np.zeros_like(self._more[0])
        most, least, least_of_one = none.copy(), none.copy(), []
        for together in self._alternatives():
            more, reach = self._more[together], reaches[together]
            most += more[~reach].max(axis=0, initial=0)
            of_any = np.minimum(more.min(axis=0), 0)
            least += of_any
            if reach.any():
                least_of_one.append(more[reach].min(axis=0) - of_any)
        return bool((most <= least + np.min(least_of_one, axis=0)).all())

    def _alternatives(self) -> list[list[int]]:
        """The options, by their order here, in sets of which one is chosen at most."""
        found: list[list[int]] = []
        for k, index in enumerate(self._later):
            own = next((each for each in found if all(self._later[o] in self._conflicts[index] for o in each)), None)
            if own is None:
                found.append([k])
            else:
                own.append(k)
        return found

    def _in_the_way(self) -> set[int]:
        """Other options that conflict with one of a place, and not with the same one of the other place."""
        own = {*self._earlier, *self._later}
        found: set[int] = set()
        for one, other in zip(self._earlier, self._later, strict=True):
            found |= self._conflicts[one] ^ self._conflicts[other]
        return found - own
