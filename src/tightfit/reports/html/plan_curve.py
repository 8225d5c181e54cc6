"""A plan's Pareto curve as inline SVG: seconds of a step over bytes on the card, with the plan, the plain run and the budget.

The curve is a stair: what is known to be reached with so many bytes; between two of its points nothing was looked for. Every mark has a shape and words of its own, so
that none is told by its colour alone; the colours are the page's, by class, and follow its light and dark.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from xml.etree.ElementTree import Element

from tightfit.planner.plan import ParetoPoint, Plan, Run
from tightfit.reports.html.markup import element
from tightfit.units import GIB, format_bytes, format_seconds

_WIDTH, _HEIGHT = 860, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 24, 30, 52
_SECONDS_UNITS = ((1.0, "seconds"), (1e-3, "milliseconds"), (1e-6, "microseconds"))
_NUM_TICKS = 8
# What is left free around the outermost marks, as a share of what they span.
_MARGIN = 0.06

Scale = Callable[[float], float]


def curve_points(plan: Plan) -> list[ParetoPoint]:
    """The points of the curve by bytes."""
    return sorted(plan.frontier, key=lambda point: point.device_bytes)


def seconds_per_gib(points: Sequence[ParetoPoint]) -> list[float | None]:
    """What a GiB more saves a step, from each point on to the next one; None for the last."""
    rates: list[float | None] = [
        (here.seconds_per_step - there.seconds_per_step) / (there.device_bytes - here.device_bytes) * GIB
        if there.device_bytes > here.device_bytes
        else None
        for here, there in itertools.pairwise(points)
    ]
    return [*rates, None] if points else []


def curve(plan: Plan) -> Element:
    """The picture, 860 x 380, for a plan that has a curve."""
    points = curve_points(plan)
    runs = [plan.baseline, *([plan.run] if plan.choices else [])]
    sizes = [p.device_bytes for p in points] + [plan.budget_bytes]
    sizes += [size for run in runs for size in (run.peak.device_low_bytes, run.peak.device_high_bytes)]
    seconds = [p.seconds_per_step for p in points] + [run.seconds_per_step for run in runs]
    unit, unit_name = next((u for u in _SECONDS_UNITS if max(seconds) >= u[0]), _SECONDS_UNITS[-1])
    x_low, x_high = _padded([size / GIB for size in sizes])
    y_low, y_high = _padded([value / unit for value in seconds])

    def x(num_bytes: float) -> float:
        share = (num_bytes / GIB - x_low) / (x_high - x_low)
        return round(_LEFT + share * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(value: float) -> float:
        share = (value / unit - y_low) / (y_high - y_low)
        return round(_HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM), 1)

    bottom, middle = _HEIGHT - _BOTTOM, (_HEIGHT + _TOP - _BOTTOM) / 2
    return element(
        "svg",
        element("title", "What memory is worth: seconds per step over memory on the card", id="curve-title"),
        element("desc", _description(plan, points), id="curve-description"),
        *(_vertical_tick(x(tick * GIB), words) for tick, words in ticks(x_low, x_high)),
        *(_horizontal_tick(y(tick * unit), words) for tick, words in ticks(y_low, y_high)),
        element("path", d=f"M{_LEFT} {_TOP}V{bottom}H{_WIDTH - _RIGHT}", class_="axis"),
        _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 10, "memory on the card, GiB", "axis-name"),
        _text(0, 0, f"{unit_name} per step", "axis-name", transform=f"translate(16 {middle}) rotate(-90)"),
        *_budget(plan, x(plan.budget_bytes)),
        *_stair(points, x, y),
        *_mark("plain", "the plain run", plan.baseline, x, y),
        *(_mark("planned", "the plan", plan.run, x, y) if plan.choices else ()),
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        role="img",
        aria_labelledby="curve-title curve-description",
        class_="curve",
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
    planned = (
        f" The plan holds {format_bytes(plan.run.peak.device_bytes)} and takes {format_seconds(plan.run.seconds_per_step)}."
        if plan.choices
        else ""
    )
    return (
        f"The curve goes from {format_bytes(first.device_bytes)} and {format_seconds(first.seconds_per_step)} to "
        f"{format_bytes(last.device_bytes)} and {format_seconds(last.seconds_per_step)}, in {len(points)} points.{planned} "
        f"The plain run holds {format_bytes(plan.baseline.peak.device_bytes)} and takes {format_seconds(plan.baseline.seconds_per_step)}. "
        f"The budget is {format_bytes(plan.budget_bytes)}. The table has the points."
    )


def _vertical_tick(at: float, words: str) -> Element:
    line = element("path", d=f"M{at} {_TOP}V{_HEIGHT - _BOTTOM}", class_="grid")
    return element("g", line, _text(at, _HEIGHT - _BOTTOM + 18, words, "tick"))


def _horizontal_tick(at: float, words: str) -> Element:
    line = element("path", d=f"M{_LEFT} {at}H{_WIDTH - _RIGHT}", class_="grid")
    return element("g", line, _text(_LEFT - 8, at + 4, words, "tick end"))


def _budget(plan: Plan, at: float) -> list[Element]:
    line = element("path", d=f"M{at} {_TOP}V{_HEIGHT - _BOTTOM}", class_="budget-line")
    side = " end" if at > _WIDTH / 2 else " begin"
    return [line, _text(at, _TOP - 9, f"budget {format_bytes(plan.budget_bytes)}", f"budget-name{side}")]


def _stair(points: Sequence[ParetoPoint], x: Scale, y: Scale) -> list[Element]:
    fastest = itertools.accumulate((point.seconds_per_step for point in points), min)
    steps = "".join(f"H{x(p.device_bytes)}V{y(s)}" for p, s in zip(points, fastest, strict=True))
    line = element("path", d=f"M{x(points[0].device_bytes)} {y(points[0].seconds_per_step)}{steps}", class_="stair")
    return [
        line,
        *(
            element(
                "circle",
                element(
                    "title", f"{format_bytes(point.device_bytes)}, {format_seconds(point.seconds_per_step)} a step"
                ),
                cx=x(point.device_bytes),
                cy=y(point.seconds_per_step),
                r=4,
                class_="point",
            )
            for point in points
        ),
    ]


def _mark(kind: str, name: str, run: Run, x: Scale, y: Scale) -> list[Element]:
    """A run with the range of its peak: a square for the plain one, a diamond for the planned one."""
    at, height = x(run.peak.device_bytes), y(run.seconds_per_step)
    words = f"{name}: {format_bytes(run.peak.device_bytes)}, {format_seconds(run.seconds_per_step)}"
    doubt = f"M{x(run.peak.device_low_bytes)} {height}H{x(run.peak.device_high_bytes)}"
    shape = "m-6 -6h12v12h-12z" if kind == "plain" else "m0 -9l9 9l-9 9l-9 -9z"
    side = "end" if at > _WIDTH / 2 else "begin"
    return [
        element("path", d=doubt, class_=f"doubt-line {kind}"),
        element("path", element("title", words), d=f"M{at} {height}{shape}", class_=f"mark {kind}"),
        _text(at + (-2 if side == "end" else 2), height - 15, words, f"mark-name {side}"),
    ]


def _text(x: float, y: float, words: str, class_: str, **attributes: str) -> Element:
    return element("text", words, x=x, y=y, class_=class_, **attributes)
