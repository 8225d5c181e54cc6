"""Stretches of numbered children that a tape shows to run one right after the other, for techniques that treat several of them as one.

Such children belong to a Sequential as far as a tape can tell: whatever else is called in a loop has operators of its own in between, or its
numbered children contain modules themselves. What is put on the live model checks.
"""

import dataclasses
import re
from collections.abc import Iterator

import numpy as np

from tightfit.analysis.modules import Anatomy, Visit
from tightfit.planner.option import Change, Option

# A cut leaves each side at least this share of what waits, if there is one that does.
_SMALLER_SIDE = 0.25


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """The children `begin` to before `end` of the module at `path`; a visit for each time they ran, and the slots of all inside.

    `inputs` are what is kept to begin there again that the plain run does not keep: an activation, say, needs its output alone.
    """

    path: str
    begin: int
    end: int
    visits: tuple[Visit, ...]
    slots: frozenset[str]
    inputs: tuple[Change, ...]

    @property
    def settings(self) -> dict[str, int]:
        """As an option has them."""
        return {"begin": self.begin, "end": self.end}

    def alike(self, anatomy: Anatomy) -> str:
        """The same for the same stretch of modules that are alike."""
        path = re.sub(r"\d+", "*", self.path)
        return f"{path}[{self.begin}:{self.end}]#{[anatomy.bytes_of(visit.waiting) for visit in self.visits]}"


class Row:
    """The numbered children of one module that ran in a row each time the module was called."""

    def __init__(self, anatomy: Anatomy, path: str, numbers: list[int], calls: list[list[Visit]]) -> None:
        self.anatomy = anatomy
        self.path = path
        self.numbers = numbers
        self._calls = calls

    def __len__(self) -> int:
        return len(self.numbers)

    def stretch(self, begin: int, end: int) -> Stretch:
        """The children from the position `begin` to before `end`, counted among those that ran."""
        visits = tuple(joined(self.anatomy, self.path, call[begin:end]) for call in self._calls)
        inside = [m for n in self.numbers[begin:end] for m in self.anatomy.modules_inside(f"{self.path}.{n}")]
        return Stretch(
            path=self.path,
            begin=self.numbers[begin],
            end=self.numbers[end] if end < len(self) else self.numbers[-1] + 1,
            visits=visits,
            slots=frozenset(f"activations@{module}" for module in inside),
            inputs=tuple(
                c for call, visit in zip(self._calls, visits, strict=True) for c in self._kept(call[:begin], visit)
            ),
        )

    def _kept(self, before: list[Visit], visit: Visit) -> Iterator[Change]:
        """The input of `visit`, from where it dies in the plain run to the end of the backward pass of `visit`."""
        output = self.anatomy.output_of(before[0].begin, before[-1].end) if before else -1
        if output >= 0 and self.anatomy.died[output] < visit.back_end_event:
            begin, size = int(self.anatomy.died[output]), int(self.anatomy.block_bytes[output])
            yield Change(begin=begin, end=visit.back_end_event, num_bytes=size)

    def operator_names(self, position: int) -> tuple[str, ...]:
        """The forward operators of one child."""
        visit = self._calls[-1][position]
        return self.anatomy.operator_names(visit.begin, visit.end)

    def waiting_bytes(self, begin: int, end: int) -> int:
        """What these children leave for the backward pass in one call, the output of the last one left out."""
        return self.anatomy.bytes_of(joined(self.anatomy, self.path, self._calls[-1][begin:end]).waiting)

    def boundary_bytes(self, position: int) -> int:
        """The output of all before the child at `position`: what is kept to begin there again; twice that if it is kept for nothing else."""
        output = joined(self.anatomy, self.path, self._calls[-1][:position]).output
        return int(self.anatomy.block_bytes[output]) * (1 if self.anatomy.waits[output] else 2) if output >= 0 else 0

    def begins_in_place(self, position: int) -> bool:
        """Whether the first operator of this child writes over its input, which is gone then."""
        name = self.operator_names(position)[0].partition(".")[2].partition(".")[0]
        return name.endswith("_")


def rows(anatomy: Anatomy) -> Iterator[Row]:
    """The rows of a run that have two children or more, some of them without modules inside."""
    children: dict[str, list[str]] = {}
    for path in anatomy.paths:
        parent, _, last = path.rpartition(".")
        if parent and last.isdigit():
            children.setdefault(parent, []).append(path)
    for path, found in children.items():
        if any(anatomy.modules_inside(child) == [child] for child in found) and path not in anatomy.modules_inside(
            path
        ):
            row = _row(anatomy, path, sorted(int(child.rpartition(".")[2]) for child in found))
            if row is not None:
                yield row


def _row(anatomy: Anatomy, path: str, numbers: list[int]) -> Row | None:
    """The row of `path`, if all its calls went through the same children once each and in order."""
    visits = {number: anatomy.visits(f"{path}.{number}") for number in numbers}
    ran: set[tuple[int, ...]] = set()
    calls = []
    for whole in anatomy.visits(path):
        inside = [(n, v) for n in numbers for v in visits[n] if whole.begin <= v.begin and v.end <= whole.end]
        ran.add(tuple(n for n, _ in inside))
        calls.append([v for _, v in inside])
    if len(ran) != 1:
        return None
    names = list(ran.pop())
    begins = [v.begin for v in calls[0]]
    if len(names) < 2 or len(set(names)) < len(names) or begins != sorted(begins):
        return None
    return Row(anatomy, path, names, calls)


def segments(row: Row, begin: int, end: int) -> Iterator[Stretch]:
    """This segment and, cut in two and again, all inside it; a segment never begins with what writes over its input."""
    if begin == 0 and row.begins_in_place(0):
        begin = 1
    if end - begin < 2:
        return
    yield row.stretch(begin, end)
    cuts = [c for c in range(begin + 1, end) if not row.begins_in_place(c)]
    if not cuts:
        return
    smaller = {c: min(row.waiting_bytes(begin, c), row.waiting_bytes(c, end)) for c in cuts}
    balanced = [c for c in cuts if smaller[c] >= _SMALLER_SIDE * row.waiting_bytes(begin, end)]
    at = min(balanced, key=row.boundary_bytes) if balanced else max(cuts, key=lambda c: smaller[c])
    yield from segments(row, begin, at)
    yield from segments(row, at, end)


def joined(anatomy: Anatomy, path: str, visits: list[Visit]) -> Visit:
    """Visits that follow each other, as one. Its input is told by those before it (`Stretch.inputs`)."""
    back_begin, back_end = min(v.back_begin for v in visits), max(v.back_end for v in visits)
    return dataclasses.replace(anatomy.visit(path, visits[0].begin, visits[-1].end, back_begin, back_end), input=-1)


def waiting_bytes(anatomy: Anatomy) -> float:
    """What waits for a backward pass in all, on average over the rounds of a run."""
    return anatomy.bytes_of(np.flatnonzero(anatomy.waits)) / max(1, anatomy.num_rounds)


def with_settings(option: Option, stretch: Stretch, alike: str, **settings: int) -> Option:
    """`option`, for this stretch and with these settings besides."""
    named = ",".join(f"{name}={value}" for name, value in settings.items())
    return dataclasses.replace(
        option,
        settings={**stretch.settings, **settings},
        alike=f"{option.technique}:{alike}:{named}",
        changes=(*option.changes, *stretch.inputs),
    )
