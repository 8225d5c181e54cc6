"""Lines through points as what the template `page/lines.svg` draws. Positions are in the units of the picture, whose y axis points down."""

import dataclasses
import math
from collections.abc import Callable, Sequence

from tightfit.reports.html.plan_curve import ticks

_WIDTH, _HEIGHT = 860, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 836, 40, 268
_HEADROOM = 1.08


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LineTick:
    """A line of the grid with its words."""

    at: float
    words: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinePoint:
    """A point with the words that are shown over it."""

    x: float
    y: float
    words: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line: its place among them, its name, its points, where its key stands."""

    number: int
    name: str
    path: str
    points: list[LinePoint]
    key_x: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LineChart:
    """All of a picture; `name` is unique in the page."""

    name: str
    title: str
    description: str
    across: str
    up: str
    lines: list[Line]
    ticks_across: list[LineTick]
    ticks_up: list[LineTick]
    width: int = _WIDTH
    height: int = _HEIGHT
    left: int = _LEFT
    right: int = _RIGHT
    top: int = _TOP
    bottom: int = _BOTTOM


def line_chart(
    name: str,
    title: str,
    across: str,
    up: str,
    xs: Sequence[float],
    lines: Sequence[tuple[str, Sequence[float]]],
    *,
    words: Callable[[float, float], str],
    is_doubled: bool = False,
) -> LineChart:
    """The chart of `lines` over the common `xs`; `is_doubled`: those are powers of two, each as far from the next."""
    scaled = [math.log2(x) for x in xs] if is_doubled else list(xs)
    low, high = min(scaled) if is_doubled else 0.0, max(scaled)
    low, high = (low, high) if high > low else (low - 1.0, high + 1.0)
    top = max(max(ys) for _, ys in lines) * _HEADROOM or 1.0

    def x_at(value: float) -> float:
        return round(_LEFT + (value - low) / (high - low) * (_RIGHT - _LEFT), 1)

    def y_at(value: float) -> float:
        return round(_BOTTOM - value / top * (_BOTTOM - _TOP), 1)

    drawn = []
    for number, (of, ys) in enumerate(lines):
        places = [(x_at(x), y_at(y)) for x, y in zip(scaled, ys, strict=True)]
        drawn.append(
            Line(
                number=number,
                name=of,
                path="M" + "L".join(f"{x} {y}" for x, y in places),
                points=[
                    LinePoint(x=x, y=y, words=f"{of}: {words(at, value)}")
                    for (x, y), at, value in zip(places, xs, ys, strict=True)
                ],
                key_x=_LEFT + number * (_RIGHT - _LEFT) / 2,
            )
        )
    marks = (
        [LineTick(at=x_at(at), words=f"{x:,.0f}") for at, x in _apart(scaled, xs)]
        if is_doubled
        else [LineTick(at=x_at(at), words=text) for at, text in ticks(low, high)]
    )
    ends = "; ".join(f"{of} from {words(xs[0], ys[0])} to {words(xs[-1], ys[-1])}" for of, ys in lines)
    return LineChart(
        name=name,
        title=title,
        description=f"{ends}.",
        across=across,
        up=up,
        lines=drawn,
        ticks_across=marks,
        ticks_up=[LineTick(at=y_at(at), words=text) for at, text in ticks(0.0, top)],
    )


def _apart(scaled: Sequence[float], xs: Sequence[float]) -> list[tuple[float, float]]:
    """The places whose words do not cover each other: the last one, and those a whole power before it."""
    last = scaled[-1]
    return [pair for pair in zip(scaled, xs, strict=True) if pair[0] == last or last - pair[0] >= 0.9]
