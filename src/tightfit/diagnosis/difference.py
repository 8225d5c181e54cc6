"""Compares two runs, each predicted or recorded: allocation sites at the peak, step by step, and where their allocations first diverge.

Runs of one program share their lines. A prediction of a rebuilt model and a recording of the original do not; then the order of allocations shows
which lines correspond, as far as both allocate the same sizes in the same order.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np

from tightfit.diagnosis.alignment import AlignedRange, align
from tightfit.diagnosis.allocation_sites import bytes_by_category
from tightfit.diagnosis.diagnosed_run import DiagnosedRun
from tightfit.diagnosis.step_spans import StepSpan, steps_of
from tightfit.recordings.frames import AllocationSite
from tightfit.simulate.history import CATEGORIES
from tightfit.tape import Column
from tightfit.units import MIB

SCHEMA = 1
NUM_CHANGES = 16
NUM_DIVERGENCES = 8
# Two versions of a program share most lines; two different programs at best those of a library.
_MIN_SHARED = 0.2
# 64 KiB: below it differences are the rounding of small blocks.
_MIN_CHANGE_BYTES = MIB // 16

Shortened = Callable[[str], str]
"""Gives a place without the folders that two runs do not share."""

Kind = Literal["grown", "shrunk", "new", "gone"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two runs."""

    label: str
    origin: str
    device: str
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    at_peak: dict[str, int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SiteChange:
    """Blocks of one category and allocation site at the peak of either run, with its line in each run, empty where it is not known."""

    kind: Kind
    category: str
    a_where: str
    b_where: str
    a_bytes: int
    b_bytes: int
    a_blocks: int
    b_blocks: int

    @property
    def more_bytes(self) -> int:
        """The bytes that the second run has more; negative for fewer."""
        return self.b_bytes - self.a_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepPair:
    """Two compared steps: their allocations, how many of them are equal in order, and their allocated peaks."""

    a_step: str
    b_step: str
    a_allocations: int
    b_allocations: int
    same_allocations: int
    a_peak_bytes: int
    b_peak_bytes: int
    a_end_bytes: int
    b_end_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One allocation: its number in the step, its requested bytes, and its allocation site."""

    number: int
    num_bytes: int
    where: str
    function: str
    operator: str
    callers: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Where the allocations of two steps diverge: the first on each side (None where that side has none), with all others of the same two sites.

    `count` is how often these two sites differ, with `a_bytes` and `b_bytes` of allocations in all.
    """

    a_step: str
    b_step: str
    a: Asked | None
    b: Asked | None
    count: int
    a_bytes: int
    b_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunDifference:
    """Two runs compared: the second against the first. `divergences` are those of the first two steps that differ, in order."""

    a: Side
    b: Side
    changes: tuple[SiteChange, ...]
    steps: tuple[StepPair, ...]
    divergences: tuple[Divergence, ...]
    matched_by: Literal["lines", "order"]

    def to_json(self) -> dict[str, Any]:
        """The object that `tightfit diff --json` prints."""
        # A key that programs read already keeps its first name.
        return {
            "schema": SCHEMA,
            **{
                "partings" if name == "divergences" else name: value for name, value in dataclasses.asdict(self).items()
            },
        }


def difference(a: DiagnosedRun, b: DiagnosedRun) -> RunDifference:
    """Compares two runs."""
    shortened = without_other_folders(*([place.name for place in subject.places] for subject in (a, b)))
    matched_by: Literal["lines", "order"] = "lines" if _share_lines(a, b, shortened) else "order"
    pairs = [_Pair(a, b, one, other, shortened if matched_by == "lines" else None) for one, other in _paired(a, b)]
    a_spots = _Spots(a, [pair.a_step for pair in pairs], shortened)
    b_spots = _Spots(b, [pair.b_step for pair in pairs], shortened)
    if matched_by == "order":
        a_spots.name_as(b_spots, [partners for pair in pairs for partners in pair.partners()])
    return RunDifference(
        a=_side(a),
        b=_side(b),
        changes=_changes(a_spots, b_spots),
        steps=tuple(pair.summary() for pair in pairs),
        # The first step that differs stands for all: later ones repeat its differences.
        divergences=tuple(next((found for pair in pairs if (found := pair.divergences())), [])[:NUM_DIVERGENCES]),
        matched_by=matched_by,
    )


def _side(subject: DiagnosedRun) -> Side:
    history = subject.history
    return Side(
        label=history.label,
        origin=history.origin,
        device=history.device,
        peak_allocated_bytes=int(history.allocated.max(initial=0)),
        peak_reserved_bytes=int(history.reserved.max(initial=0)),
        at_peak=bytes_by_category(history, history.alive_at(history.peak_event)),
    )


def _paired(a: DiagnosedRun, b: DiagnosedRun) -> list[tuple[StepSpan, StepSpan]]:
    """Pairs of steps: by name where both runs have names, else counted from the last step, which is the most typical one."""
    ours, theirs = (steps_of(subject.history, kinds=("step",)) for subject in (a, b))
    if not (a.history.are_spans_guessed or b.history.are_spans_guessed):
        by_name = {step.name: step for step in theirs}
        named = [(step, by_name[step.name]) for step in ours if step.name in by_name]
        if named:
            return named
    num_steps = min(len(ours), len(theirs))
    return list(zip(ours[len(ours) - num_steps :], theirs[len(theirs) - num_steps :], strict=True))


class _Pair:
    """Two steps with their allocations aligned: by line (as `shortened` has it) and operator where the runs share those, else by size."""

    def __init__(
        self,
        a: DiagnosedRun,
        b: DiagnosedRun,
        a_step: StepSpan,
        b_step: StepSpan,
        shortened: Shortened | None,
    ) -> None:
        self.a, self.b, self.a_step, self.b_step = a, b, a_step, b_step
        self.a_blocks, self.b_blocks = _born_in(a, a_step), _born_in(b, b_step)
        sizes = _sizes(a, self.a_blocks), _sizes(b, self.b_blocks)
        if shortened is None:
            self.aligned_ranges = align(*sizes)
        else:
            # By site first and size second: two runs with different batch sizes have no size in common, but all their lines.
            places = [_line_and_operator(a, block, shortened) for block in self.a_blocks.tolist()]
            others = [_line_and_operator(b, block, shortened) for block in self.b_blocks.tolist()]
            self.aligned_ranges = [piece for aligned in align(places, others) for piece in _by_size(aligned, *sizes)]

    def summary(self) -> StepPair:
        """The figures of both."""
        return StepPair(
            a_step=self.a_step.name,
            b_step=self.b_step.name,
            a_allocations=len(self.a_blocks),
            b_allocations=len(self.b_blocks),
            same_allocations=sum(aligned.a_end - aligned.a_begin for aligned in self.aligned_ranges if aligned.is_same),
            a_peak_bytes=self.a_step.peak_allocated_bytes,
            b_peak_bytes=self.b_step.peak_allocated_bytes,
            a_end_bytes=self.a_step.end_allocated_bytes,
            b_end_bytes=self.b_step.end_allocated_bytes,
        )

    def partners(self) -> Iterator[tuple[int, int]]:
        """Pairs of blocks that the same allocation of the program made in both runs."""
        for aligned in self.aligned_ranges:
            if aligned.is_same:
                yield from zip(
                    self.a_blocks[aligned.a_begin : aligned.a_end].tolist(),
                    self.b_blocks[aligned.b_begin : aligned.b_end].tolist(),
                    strict=True,
                )

    def divergences(self) -> list[Divergence]:
        """Where the two diverge, grouped by pairs of allocation sites."""
        groups: dict[tuple[str, str], list[AlignedRange]] = {}
        for aligned in self.aligned_ranges:
            if not aligned.is_same and not self._is_from_before(aligned):
                first_a = self._asked(self.a, self.a_blocks, aligned.a_begin, aligned.a_end)
                first_b = self._asked(self.b, self.b_blocks, aligned.b_begin, aligned.b_end)
                key = (first_a.where if first_a else "", first_b.where if first_b else "")
                groups.setdefault(key, []).append(aligned)
        return [
            Divergence(
                a_step=self.a_step.name,
                b_step=self.b_step.name,
                a=self._asked(self.a, self.a_blocks, some[0].a_begin, some[0].a_end),
                b=self._asked(self.b, self.b_blocks, some[0].b_begin, some[0].b_end),
                count=len(some),
                a_bytes=sum(sum(_sizes(self.a, self.a_blocks[s.a_begin : s.a_end])) for s in some),
                b_bytes=sum(sum(_sizes(self.b, self.b_blocks[s.b_begin : s.b_end])) for s in some),
            )
            for some in groups.values()
        ]

    def _is_from_before(self, aligned: AlignedRange) -> bool:
        """Whether a difference is only that one recording began later, when these blocks were already allocated."""
        if aligned.a_begin or aligned.b_begin or (self.a_step.begin and self.b_step.begin):
            return False
        late = [run for run, end in ((self.a, aligned.a_end), (self.b, aligned.b_end)) if not end]
        return any(bool((run.history.blocks.allocated_at < 0).any()) for run in late)

    @staticmethod
    def _asked(subject: DiagnosedRun, blocks: Column, begin: int, end: int) -> Asked | None:
        if begin == end:
            return None
        place = _place(subject, int(blocks[begin]))
        return Asked(
            number=begin,
            num_bytes=int(subject.history.blocks.num_bytes[blocks[begin]]),
            where=place.name,
            function=place.function,
            operator=place.operator,
            callers=place.callers,
        )


def _by_size(aligned: AlignedRange, a: Sequence[int], b: Sequence[int]) -> Iterator[AlignedRange]:
    """Splits a range of equal allocation sites into ranges of equal sizes and single allocations of different sizes."""
    if not aligned.is_same:
        yield aligned
        return
    begin = 0
    num_places = aligned.a_end - aligned.a_begin
    are_same = [a[aligned.a_begin + at] == b[aligned.b_begin + at] for at in range(num_places)]
    while begin < num_places:
        end = begin + 1
        # Different sizes stay single, so that each is reported with its own partner.
        while are_same[begin] and end < num_places and are_same[end]:
            end += 1
        yield AlignedRange(
            is_same=are_same[begin],
            a_begin=aligned.a_begin + begin,
            a_end=aligned.a_begin + end,
            b_begin=aligned.b_begin + begin,
            b_end=aligned.b_begin + end,
        )
        begin = end


def _line_and_operator(subject: DiagnosedRun, block: int, shortened: Shortened) -> tuple[str, str]:
    place = _place(subject, block)
    return shortened(place.name), place.operator


def _share_lines(a: DiagnosedRun, b: DiagnosedRun, shortened: Shortened) -> bool:
    """Whether the two runs are of one program: lines that both have allocate a good part of the first run's bytes."""
    known = {shortened(place.line) for place in b.places if place.line}
    blocks = a.history.blocks
    num_bytes = np.bincount(blocks.stack, weights=blocks.num_bytes, minlength=len(a.places))
    # Weighted by bytes: the lines that matter are few, and libraries have many small ones in common.
    lines = [shortened(place.line) for place in a.places]
    named_bytes = sum(count for line, count in zip(lines, num_bytes, strict=True) if line)
    shared_bytes = sum(count for line, count in zip(lines, num_bytes, strict=True) if line in known)
    return bool(shared_bytes > _MIN_SHARED * named_bytes)


def _born_in(subject: DiagnosedRun, step: StepSpan) -> Column:
    """The blocks that were allocated in any piece of a step, in order."""
    allocated_at = subject.history.blocks.allocated_at
    inside = np.zeros(len(allocated_at), dtype=bool)
    for span in subject.history.spans:
        if (span.name, span.kind) == (step.name, step.kind):
            inside |= (allocated_at >= span.begin) & (allocated_at < span.end)
    return np.flatnonzero(inside)


def _sizes(subject: DiagnosedRun, blocks: Column) -> list[int]:
    return subject.history.blocks.num_bytes[blocks].tolist()


def _place(subject: DiagnosedRun, block: int) -> AllocationSite:
    return subject.places[int(subject.history.blocks.stack[block])]


def without_other_folders(*runs: Sequence[str]) -> Shortened:
    """Shortens places of `runs` to files and lines, as folders differ from machine to machine; with as many folders as tell the files of one run apart."""
    lengths: Counter[str] = Counter()
    for places in runs:
        files: dict[str, set[tuple[str, ...]]] = {}
        for place in places:
            # From the name of the file outwards.
            parts = tuple(reversed(place.rpartition(":")[0].replace("\\", "/").split("/")))
            files.setdefault(parts[0], set()).add(parts)
        for name, paths in files.items():
            length = 1
            while len({parts[:length] for parts in paths}) < len(paths):
                length += 1
            lengths[name] = max(lengths[name], length)

    def shortened(place: str) -> str:
        parts = place.replace("\\", "/").split("/")
        return "/".join(parts[-max(1, lengths[parts[-1].rpartition(":")[0]]) :])

    return shortened


class _Spots:
    """The category and the line of each block of a run, and which blocks are allocated at its peak.

    Of several equal peaks, one in a compared step is taken, as only its allocations have partners on the other side.
    """

    def __init__(self, subject: DiagnosedRun, compared: Sequence[StepSpan], shortened: Shortened) -> None:
        history = subject.history
        peaks = np.flatnonzero(history.allocated == history.allocated.max(initial=0))
        inside = [at for at in peaks.tolist() if any(step.begin <= at < step.end for step in compared)]
        # A steady loop is as high in every step; the first peak would lie in a step without a partner.
        peak = inside[-1] if inside else history.peak_event
        names = [place.name for place in subject.places]
        self.alive = history.alive_at(peak)
        self.num_bytes = history.blocks.block_bytes
        self.full = [names[stack] for stack in history.blocks.stack.tolist()]
        self.where = [shortened(name) for name in self.full]
        self.category = history.blocks.category.tolist()

    def name_as(self, other: "_Spots", partners: Sequence[tuple[int, int]]) -> None:
        """Renames sites after `other`: each block after its partner, the rest after what most blocks of their line are called there."""
        # Only some blocks of a line have partners (those of the compared steps); the others are named after the majority.
        by_line: dict[str, Counter[str]] = {}
        for ours, theirs in partners:
            by_line.setdefault(self.where[ours], Counter())[other.where[theirs]] += 1
        most = {line: found.most_common(1)[0][0] for line, found in by_line.items()}
        self.where = [most.get(line, line) for line in self.where]
        for ours, theirs in partners:
            self.where[ours], self.category[ours] = other.where[theirs], other.category[theirs]


@dataclasses.dataclass(slots=True)
class _Held:
    """Bytes and blocks of one allocation site at a peak, and its line with its folder."""

    num_bytes: int = 0
    num_blocks: int = 0
    where: str = ""


def _changes(a: _Spots, b: _Spots) -> tuple[SiteChange, ...]:
    """The differences at the two peaks, largest first."""
    # A category with blocks of unknown site (allocated before the recording began) is compared as a whole.
    alive = [np.flatnonzero(side.alive).tolist() for side in (a, b)]
    whole = {
        side.category[at] for side, blocks in zip((a, b), alive, strict=True) for at in blocks if not side.where[at]
    }
    rows: dict[tuple[int, str], tuple[_Held, _Held]] = {}
    for number, (side, blocks) in enumerate(zip((a, b), alive, strict=True)):
        for at in blocks:
            category = side.category[at]
            where = "" if category in whole else side.where[at]
            held = rows.setdefault((category, where), (_Held(), _Held()))[number]
            held.num_bytes += int(side.num_bytes[at])
            held.num_blocks += 1
            held.where = "" if category in whole else side.full[at]
    found = [_change(CATEGORIES[category], *held) for (category, _), held in rows.items()]
    changed = [change for change in found if abs(change.more_bytes) >= _MIN_CHANGE_BYTES]
    return tuple(sorted(changed, key=lambda change: -abs(change.more_bytes))[:NUM_CHANGES])


def _change(category: str, ours: _Held, theirs: _Held) -> SiteChange:
    kind: Kind = "grown" if theirs.num_bytes > ours.num_bytes else "shrunk"
    if not ours.num_bytes or not theirs.num_bytes:
        kind = "gone" if ours.num_bytes else "new"
    return SiteChange(
        kind=kind,
        category=category,
        a_where=ours.where,
        b_where=theirs.where,
        a_bytes=ours.num_bytes,
        b_bytes=theirs.num_bytes,
        a_blocks=ours.num_blocks,
        b_blocks=theirs.num_blocks,
    )
