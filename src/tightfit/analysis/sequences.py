"""Ranges of numbered children that run right after each other on a tape, for techniques that treat several layers as one.

As far as a tape can tell they belong to a Sequential: other modules that are called in a loop have operators in between, or numbered children
with submodules. The techniques check it again on the live model.
"""

import dataclasses
import re
from collections.abc import Iterator

import numpy as np

from tightfit.analysis.modules import Anatomy, Visit
from tightfit.planner.option import Change, Option

# A cut leaves each side at least this share of what is saved for backward, where such a cut exists.
_SMALLER_SIDE = 0.25


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """The children `[begin, end)` of the module at `path`, with one visit per call and the slots of all modules inside.

    `inputs` are the inputs that recomputation retains and the plain run frees: a ReLU, say, saves its output only.
    """

    path: str
    begin: int
    end: int
    visits: tuple[Visit, ...]
    slots: frozenset[str]
    inputs: tuple[Change, ...]

    @property
    def settings(self) -> dict[str, int]:
        """The settings of an option for this range."""
        return {"begin": self.begin, "end": self.end}

    def alike(self, anatomy: Anatomy) -> str:
        """The equivalence class: equal for the same range of children in modules that do the same."""
        path = re.sub(r"\d+", "*", self.path)
        return f"{path}[{self.begin}:{self.end}]#{[anatomy.bytes_of(visit.waiting) for visit in self.visits]}"


class Row:
    """The numbered children of one module that ran one after another each time the module was called."""

    def __init__(self, anatomy: Anatomy, path: str, numbers: list[int], calls: list[list[Visit]]) -> None:
        self.anatomy = anatomy
        self.path = path
        self.numbers = numbers
        self._calls = calls

    def __len__(self) -> int:
        return len(self.numbers)

    def stretch(self, begin: int, end: int) -> Stretch:
        """The children at positions `[begin, end)` among those that ran."""
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
        """The input of `visit`, from where the plain run frees it to the end of the backward pass of `visit`."""
        output = self.anatomy.output_of(before[0].begin, before[-1].end) if before else -1
        if output >= 0 and self.anatomy.died[output] < visit.back_end_event:
            begin, size = int(self.anatomy.died[output]), int(self.anatomy.block_bytes[output])
            yield Change(begin=begin, end=visit.back_end_event, num_bytes=size)

    def operator_names(self, position: int) -> tuple[str, ...]:
        """The forward operators of one child."""
        visit = self._calls[-1][position]
        return self.anatomy.operator_names(visit.begin, visit.end)

    def waiting_bytes(self, begin: int, end: int) -> int:
        """The bytes that these children save for backward in one call, without the output of the last one."""
        return self.anatomy.bytes_of(joined(self.anatomy, self.path, self._calls[-1][begin:end]).waiting)

    def boundary_bytes(self, position: int) -> int:
        """The bytes of the input of the child at `position`, which recomputing it retains; doubled if nothing else retains that input."""
        output = joined(self.anatomy, self.path, self._calls[-1][:position]).output
        return int(self.anatomy.block_bytes[output]) * (1 if self.anatomy.waits[output] else 2) if output >= 0 else 0

    def begins_in_place(self, position: int) -> bool:
        """Whether the first operator of this child overwrites its input (ReLU(inplace=True)), which cannot be an input to recompute from then."""
        name = self.operator_names(position)[0].partition(".")[2].partition(".")[0]
        return name.endswith("_")


def rows(anatomy: Anatomy) -> Iterator[Row]:
    """The sequences of two or more children, some of them leaf modules."""
    children: dict[str, list[str]] = {}
    for path in anatomy.paths:
        parent, _, last = path.rpartition(".")
        if parent and last.isdigit():
            children.setdefault(parent, []).append(path)
    for path, found in children.items():
        # Blocks with submodules are candidates of their own in `recomputable`; a container with operators of its own is not a
        # Sequential.
        if any(anatomy.modules_inside(child) == [child] for child in found) and path not in anatomy.modules_inside(
            path
        ):
            row = _row(anatomy, path, sorted(int(child.rpartition(".")[2]) for child in found))
            if row is not None:
                yield row


def _row(anatomy: Anatomy, path: str, numbers: list[int]) -> Row | None:
    """The sequence of `path`, if each of its calls ran the same children once and in order."""
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
    """This segment and, by bisection, all segments inside it; no segment begins with an operator that overwrites its input."""
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
    # Among balanced cuts the smallest boundary wins, which in a ConvNet lies behind a pooling layer.
    at = min(balanced, key=row.boundary_bytes) if balanced else max(cuts, key=lambda c: smaller[c])
    yield from segments(row, begin, at)
    yield from segments(row, at, end)


def joined(anatomy: Anatomy, path: str, visits: list[Visit]) -> Visit:
    """Consecutive visits merged into one, without an input, which `Stretch.inputs` holds."""
    back_begin, back_end = min(v.back_begin for v in visits), max(v.back_end for v in visits)
    return dataclasses.replace(anatomy.visit(path, visits[0].begin, visits[-1].end, back_begin, back_end), input=-1)


def waiting_bytes(anatomy: Anatomy) -> float:
    """The bytes that are saved for backward, on average over the rounds of a run."""
    return anatomy.bytes_of(np.flatnonzero(anatomy.waits)) / max(1, anatomy.num_rounds)


def with_settings(option: Option, stretch: Stretch, alike: str, **settings: int) -> Option:
    """`option` for this range of children, with further settings."""
    named = ",".join(f"{name}={value}" for name, value in settings.items())
    return dataclasses.replace(
        option,
        settings={**stretch.settings, **settings},
        alike=f"{option.technique}:{alike}:{named}",
        changes=(*option.changes, *stretch.inputs),
    )
