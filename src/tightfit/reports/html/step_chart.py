"""The predicted step as what the template `page/step.svg` draws: a row for the host, each stream and each copy engine, in seconds from left to right.

A step has thousands of kernels and a row a thousand pixels. Work of one phase and block that follows without a visible gap is one bar;
bars narrower than a pixel are drawn with the one before.
"""

import dataclasses
import re
from collections.abc import Iterator, Sequence

from tightfit.reports.html.plan_curve import ticks
from tightfit.simulate.step_tracks import StepTrack, StepTracks, TrackWork
from tightfit.tape import Phase
from tightfit.units import format_seconds

_WIDTH, _LEFT, _RIGHT = 1200, 190, 1180
_TOP, _ROW, _BAR, _PATH = 26, 44, 22, 5
# In units of the picture.
_VISIBLE = 0.8
_MAX_BARS = 1500
_NUM_CAUSES = 8
PHASES = {Phase.FORWARD: "forward", Phase.BACKWARD: "backward", Phase.OPTIMIZER: "optimizer", Phase.OTHER: "other"}
# The module's path up to its first number: the block of a repeated one.
_BLOCK = re.compile(r"^.*?\.\d+(?=\.|$)|^\d+(?=\.|$)")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepBar:
    """A bar in a row: its phase, place, and the words shown over it."""

    phase: str
    x: float
    width: float
    words: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """The row of one resource. `path` are lines under its bars, where the step waits for it."""

    name: str
    idle: str
    y: float
    bars: list[StepBar]
    path: list[tuple[float, float]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepChart:
    """All of the picture and the table beside it. `causes` are seconds on the critical path and their share, by kind of work and where it runs."""

    rows: list[StepRow]
    ticks: list[tuple[float, str]]
    description: str
    phases: list[str]
    causes: list[tuple[str, str, float, str]]
    unit: str
    width: int = _WIDTH
    height: int = 0
    left: int = _LEFT
    right: int = _RIGHT
    bar: int = _BAR
    path_height: int = _PATH


def step_chart(tracks: StepTracks) -> StepChart | None:
    """The chart of `tracks`; None for a step that takes no time."""
    if not tracks.seconds:
        return None
    scale = (_RIGHT - _LEFT) / tracks.seconds
    factor, unit = next(((f, u) for f, u in ((1.0, "s"), (1e3, "ms")) if tracks.seconds * f >= 1), (1e6, "µs"))
    rows = [_row(track, number, scale, tracks.seconds) for number, track in enumerate(tracks.tracks)]
    used = {bar.phase for row in rows for bar in row.bars}
    height = _TOP + _ROW * len(rows) + 20
    return StepChart(
        rows=rows,
        ticks=[(round(_LEFT + at / factor * scale, 1), words) for at, words in ticks(0.0, tracks.seconds * factor)],
        description="; ".join(f"{row.name}, {row.idle}" for row in rows),
        phases=[words for words in PHASES.values() if words in used],
        causes=_causes(tracks),
        unit=unit,
        height=height,
    )


def _causes(tracks: StepTracks) -> list[tuple[str, str, float, str]]:
    rows = [
        (what, resource, seconds, f"{seconds / tracks.seconds:.1%}")
        for (what, resource), seconds in tracks.critical_seconds.items()
    ]
    rest = sum(seconds for _, _, seconds, _ in rows[_NUM_CAUSES:])
    return rows[:_NUM_CAUSES] + ([("other work", "", rest, f"{rest / tracks.seconds:.1%}")] if rest else [])


def _row(track: StepTrack, number: int, scale: float, period: float) -> StepRow:
    visible = _VISIBLE
    bars = list(_bars(track.work, scale, visible))
    while len(bars) > _MAX_BARS:
        visible *= 2
        bars = list(_bars(track.work, scale, visible))
    return StepRow(
        name=track.resource,
        idle=f"{track.idle_seconds / period:.0%} idle",
        y=_TOP + number * _ROW,
        bars=bars,
        path=list(_path(track.work, scale)),
    )


def _bars(work: Sequence[TrackWork], scale: float, visible: float) -> Iterator[StepBar]:
    group: list[TrackWork] = []
    for part in work:
        if group and not _belongs(group, part, scale, visible):
            yield _bar(group, scale)
            group = []
        group.append(part)
    if group:
        yield _bar(group, scale)


def _belongs(group: Sequence[TrackWork], part: TrackWork, scale: float, visible: float) -> bool:
    if (part.begin_seconds - group[-1].end_seconds) * scale > visible:
        return False
    is_alike = part.phase == group[-1].phase and _block(part.module) == _block(group[-1].module)
    return is_alike or (group[-1].end_seconds - group[0].begin_seconds) * scale < visible


def _bar(group: Sequence[TrackWork], scale: float) -> StepBar:
    begin, end = group[0].begin_seconds, group[-1].end_seconds
    last = group[-1]
    taken: dict[str, float] = {}
    for part in group:
        taken[part.what] = taken.get(part.what, 0.0) + part.end_seconds - part.begin_seconds
    most = max(taken, key=lambda what: taken[what])
    where = f"{PHASES[last.phase]}, {_block(last.module)}" if last.module else PHASES[last.phase]
    count = f"{len(group)} operators" if len(group) > 1 else last.name or last.what
    return StepBar(
        phase=PHASES[last.phase],
        x=round(_LEFT + begin * scale, 2),
        width=round(max((end - begin) * scale, 0.2), 2),
        words=f"{where}: {format_seconds(end - begin)} from {format_seconds(begin)} on, {count}"
        + (f", most in {most}" if len(group) > 1 else ""),
    )


def _path(work: Sequence[TrackWork], scale: float) -> Iterator[tuple[float, float]]:
    """Place and width of each stretch on the critical path; gaps too narrow to see are closed."""
    begin = end = None
    for part in work:
        if not part.is_critical:
            continue
        if begin is not None and end is not None and (part.begin_seconds - end) * scale > _VISIBLE:
            yield round(_LEFT + begin * scale, 2), round((end - begin) * scale, 2)
            begin = None
        begin = part.begin_seconds if begin is None else begin
        end = part.end_seconds
    if begin is not None and end is not None:
        yield round(_LEFT + begin * scale, 2), round((end - begin) * scale, 2)


def _block(module: str) -> str:
    found = _BLOCK.match(module)
    return found[0] if found else module.partition(".")[0]
