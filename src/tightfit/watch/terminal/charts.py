"""History as signs of a terminal: a line of bars, and a chart with the forecast behind it."""

import itertools
import math
from collections.abc import Sequence

import numpy as np

from tightfit.forecast.series import Floats

BLOCKS = " ▁▂▃▄▅▆▇█"
ASCII_BLOCKS = " .:-=+*%#"


def resampled(values: Floats, width: int) -> list[float]:
    """The largest value of each of `width` spans, NaN where there is none; the end of what is there stands at the right."""
    if not len(values) or width <= 0:
        return []
    edges = np.linspace(0, len(values), num=width + 1)
    found = []
    for begin, end in itertools.pairwise(edges.tolist()):
        part = values[int(begin) : max(int(begin) + 1, math.ceil(end))]
        part = part[~np.isnan(part)]
        found.append(float(part.max()) if len(part) else math.nan)
    return found


def sparkline(values: Floats, width: int, top: float, blocks: str = BLOCKS) -> str:
    """One line of `width` signs; full height is `top`. A value above zero is at least the lowest bar, and no value is a blank."""
    return "".join(_sign(value, top, blocks) for value in resampled(values, width))


def chart(values: Sequence[float], height: int, top: float, blocks: str = BLOCKS) -> list[str]:
    """Bars over `height` lines, the highest line first; each value is one column."""
    lines = []
    for row in range(height - 1, -1, -1):
        cells = []
        for value in values:
            part = 0.0 if math.isnan(value) or top <= 0 else value / top * height - row
            # The lowest line shows that there is something, however little.
            least = 1 if row == 0 and value > 0 else 0
            cells.append(blocks[max(least, min(8, int(max(0.0, part) * 8 + 0.5)))])
        lines.append("".join(cells))
    return lines


def _sign(value: float, top: float, blocks: str) -> str:
    if math.isnan(value) or top <= 0:
        return blocks[0]
    return blocks[max(1 if value > 0 else 0, min(8, round(8 * value / top)))]
