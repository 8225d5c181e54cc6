"""A plan's Pareto curve as what the template `page/curve.svg` draws: time per step over peak GPU memory, the plan, the plain run, the budget.

The curve is a stair: what is known to be reached with so many bytes; between two of its points nothing was looked for. Positions are in the units
of the picture, whose y axis points down.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

from tightfit.planner.plan import ParetoPoint, Plan, Run
from tightfit.reports.html.plan_labels import Box, Label, leader, placed
from tightfit.units import GIB, MIB, format_bytes, format_seconds

_WIDTH, _HEIGHT = 860, 380
# The edges of the area between the axes.
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 836, 30, 328
_FOR_WORDS = Box(left=_LEFT + 6, top=0, right=_WIDTH - 4, bottom=_BOTTOM - 6)
_SECONDS_UNITS = ((1.0, "seconds"), (1e-3, "milliseconds"), (1e-6, "microseconds"))
_NUM_TICKS = 8
# What is left free around the outermost marks, as a share of what they span.
_MARGIN = 0.06

Scale = Callable[[float], float]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A line across the area with its words; `anchor` is the end of the words that is at the line."""

    at: float
    words: str
    anchor: str = "middle"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A point of the curve, with the words that are shown over it."""

    x: float
    y: float
    words: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A traced run, `plain` or `planned`, with the range of its peak, and where a line to its words ends if they are far away."""

    kind: str
    x: float
    y: float
    low_x: float
    high_x: float
    label: Label
    leader: tuple[float, float] | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """All of the picture; `stair` is a path, `description` says in words what it shows."""

    width: int = _WIDTH
    height: int = _HEIGHT
    left: int = _LEFT
    right: int = _RIGHT
    top: int = _TOP
    bottom: int = _BOTTOM
    description: str
    bytes_unit: str
    bytes_of_unit: int
    unit: str
    ticks_across: list[Tick]
    ticks_up: list[Tick]
    budget: Tick
    stair: str
    points: list[Point]
    marks: list[Mark]


def curve_points(plan: Plan) -> list[ParetoPoint]:
    """The points of the curve by bytes."""
    return sorted(plan.frontier, key=lambda point: point.device_bytes)


def seconds_per_unit(points: Sequence[ParetoPoint], unit_bytes: int) -> list[float | None]:
    """Seconds per step saved per extra `unit_bytes`, from each point on to the next one; None for the last."""
    rates: list[float | None] = [
        (here.seconds_per_step - there.seconds_per_step) / (there.device_bytes - here.device_bytes) * unit_bytes
        if there.device_bytes > here.device_bytes
        else None
        for here, there in itertools.pairwise(points)
    ]
    return [*rates, None] if points else []


def curve_of(plan: Plan) -> Curve:
    """The picture for a plan that has a curve."""
    points = curve_points(plan)
    runs = [plan.baseline, *([plan.run] if plan.has_planned_run else [])]
    sizes = [p.device_bytes for p in points] + [plan.budget_bytes]
    sizes += [size for run in runs for size in (run.peak.device_low_bytes, run.peak.device_high_bytes)]
    seconds = [p.seconds_per_step for p in points] + [run.seconds_per_step for run in runs]
    unit, unit_name = next((u for u in _SECONDS_UNITS if max(seconds) >= u[0]), _SECONDS_UNITS[-1])
    bytes_unit, of_unit = ("GiB", GIB) if max(sizes) >= GIB else ("MiB", MIB)
    x_low, x_high = _padded([size / of_unit for size in sizes])
    y_low, y_high = _padded([value / unit for value in seconds])

    def x(num_bytes: float) -> float:
        return round(_LEFT + (num_bytes / of_unit - x_low) / (x_high - x_low) * (_RIGHT - _LEFT), 1)

    def y(value: float) -> float:
        return round(_BOTTOM - (value / unit - y_low) / (y_high - y_low) * (_BOTTOM - _TOP), 1)

    budget = _budget(plan, x(plan.budget_bytes))
    stair = _stair(points, x, y)
    line = Box(left=budget.at - 2, top=_TOP, right=budget.at + 2, bottom=_BOTTOM)
    marks = _marks(plan, x, y, taken=[_label_of(budget).box, line, *_strokes(stair)])
    return Curve(
        description=_description(plan, points),
        bytes_unit=bytes_unit,
        bytes_of_unit=of_unit,
        unit=unit_name,
        ticks_across=[Tick(at=x(tick * of_unit), words=words) for tick, words in ticks(x_low, x_high)],
        ticks_up=[Tick(at=y(tick * unit), words=words) for tick, words in ticks(y_low, y_high)],
        budget=budget,
        stair=f"M{stair[0][0]} {stair[0][1]}" + "".join(f"H{across}V{up}" for across, up in stair),
        points=[_point(point, x, y) for point in points],
        marks=marks,
    )


def ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Round numbers from `low` to `high`, at most nine, with their words; each is a multiple of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / _NUM_TICKS
    power = math.floor(math.log10(rough))
    step = next(factor * 10.0**power for factor in (1, 2, 5, 10) if factor * 10.0**power >= rough)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    found = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    return [(number * step, f"{number * step:,.{digits}f}") for number in found]


def _padded(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    margin = (high - low) * _MARGIN or abs(high) * _MARGIN or 1.0
    return max(0.0, low - margin), high + margin


def _description(plan: Plan, points: Sequence[ParetoPoint]) -> str:
    first, last = points[0], points[-1]
    planned = f" The plan needs {_needs(plan.run)}." if plan.has_planned_run else ""
    return (
        f"The curve goes from {format_bytes(first.device_bytes)} and {format_seconds(first.seconds_per_step)} to "
        f"{format_bytes(last.device_bytes)} and {format_seconds(last.seconds_per_step)}, in {len(points)} points.{planned} "
        f"The plain run needs {_needs(plan.baseline)}. "
        f"The budget is {format_bytes(plan.budget_bytes)}. The table has the points."
    )


def _needs(run: Run) -> str:
    return f"{format_bytes(run.peak.device_bytes)} and {format_seconds(run.seconds_per_step)} per step"


def _budget(plan: Plan, at: float) -> Tick:
    words = f"budget {format_bytes(plan.budget_bytes)}"
    return Tick(at=at, words=words, anchor="end" if at > _WIDTH / 2 else "begin")


def _label_of(tick: Tick) -> Label:
    return Label(words=tick.words, x=tick.at, y=_TOP - 9, anchor=tick.anchor)


def _stair(points: Sequence[ParetoPoint], x: Scale, y: Scale) -> list[tuple[float, float]]:
    """The corners of the stair: across to each point, and there to the least seconds up to it."""
    fastest = itertools.accumulate((point.seconds_per_step for point in points), min)
    return [(x(point.device_bytes), y(seconds)) for point, seconds in zip(points, fastest, strict=True)]


def _strokes(stair: Sequence[tuple[float, float]]) -> list[Box]:
    """What the stair and its points cover."""
    strokes = [Box.around(x, y, 5) for x, y in stair]
    for (left, top), (right, bottom) in itertools.pairwise(stair):
        strokes += [
            Box(left=left, top=top - 1, right=right, bottom=top + 1),
            Box(left=right - 1, top=top, right=right + 1, bottom=bottom),
        ]
    return strokes


def _point(point: ParetoPoint, x: Scale, y: Scale) -> Point:
    words = f"{format_bytes(point.device_bytes)}, {format_seconds(point.seconds_per_step)} per step"
    return Point(x=x(point.device_bytes), y=y(point.seconds_per_step), words=words)


def _marks(plan: Plan, x: Scale, y: Scale, *, taken: Sequence[Box]) -> list[Mark]:
    """The plain run and the planned one, each with its words where they cover least of what is there and of each other."""
    runs = [
        ("plain", "the plain run", plan.baseline),
        *([("planned", "the plan", plan.run)] if plan.has_planned_run else []),
    ]
    covered = [*taken]
    for _, _, run in runs:
        height = y(run.seconds_per_step)
        covered.append(Box.around(x(run.peak.device_bytes), height, 9))
        low_x, high_x = x(run.peak.device_low_bytes), x(run.peak.device_high_bytes)
        covered.append(Box(left=low_x, top=height - 1, right=high_x, bottom=height + 1))
    marks = []
    for kind, name, run in runs:
        words = f"{name}: {format_bytes(run.peak.device_bytes)}, {format_seconds(run.seconds_per_step)}"
        at, height = x(run.peak.device_bytes), y(run.seconds_per_step)
        label = placed(words, at, height, inside=_FOR_WORDS, taken=covered)
        covered.append(label.box)
        low_x, high_x = x(run.peak.device_low_bytes), x(run.peak.device_high_bytes)
        marks.append(
            Mark(kind=kind, x=at, y=height, low_x=low_x, high_x=high_x, label=label, leader=leader(label, at, height))
        )
    return marks
