"""Places the words of marks in a picture so that they cover neither one another nor what they are about."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Self

# Of bold 14 px sans serif, the widest of the fonts that pages ask for (DejaVu Sans): the pixels of a mean character, and of a line.
_CHARACTER_WIDTH = 8.2
_ASCENT, _DESCENT = 13, 4
# Around words, so that they do not touch a line.
_GAP = 3
# How far below the middle of its mark a line of words may stand, and how far to the side of it the words may begin, or
# before it, the best first.
_LINES = (-15, 25, 5, -35, 45, 65, -55, 85, -75, 105, -95, 125, 145, 165, 185)
_BESIDE = (2, 14, 40, -40, -80, -120, 80, 120, 160, 200, 240)
# Words on both sides of their mark are read as a heading of it: as bad as so much farther away.
_ACROSS = 30
# Words that are farther from their mark than this have a line to it.
_FAR = 24


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A rectangle of the picture, whose y axis points down."""

    left: float
    top: float
    right: float
    bottom: float

    @classmethod
    def around(cls, x: float, y: float, radius: float) -> Self:
        """The square with its middle at (x, y)."""
        return cls(left=x - radius, top=y - radius, right=x + radius, bottom=y + radius)

    def overlap(self, other: "Box") -> float:
        """The area that both cover."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.bottom, other.bottom) - max(self.top, other.top)
        return max(0.0, width) * max(0.0, height)

    def grown(self, by: float) -> "Box":
        """The rectangle with a margin."""
        return Box(left=self.left - by, top=self.top - by, right=self.right + by, bottom=self.bottom + by)

    def distance(self, x: float, y: float) -> float:
        """From a point to the rectangle."""
        across = max(self.left - x, 0.0, x - self.right)
        down = max(self.top - y, 0.0, y - self.bottom)
        return math.hypot(across, down)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """Words at (x, y), the baseline; `anchor` is `begin` or `end`, whichever of the words is at x."""

    words: str
    x: float
    y: float
    anchor: str

    @property
    def box(self) -> Box:
        """What the words cover, estimated by their number of characters."""
        width = _CHARACTER_WIDTH * len(self.words)
        left = self.x if self.anchor == "begin" else self.x - width
        return Box(left=left, top=self.y - _ASCENT, right=left + width, bottom=self.y + _DESCENT)


def placed(words: str, x: float, y: float, *, inside: Box, taken: Sequence[Box]) -> Label:
    """`words` near the mark at (x, y), towards the wider side or the other: the nearest place in `inside` that covers least of `taken`."""
    to_right = x <= (inside.left + inside.right) / 2
    places = [
        Label(
            words=words,
            x=round(x + (beside if anchor == "begin" else -beside), 1),
            y=round(y + down, 1),
            anchor=anchor,
        )
        for beside in _BESIDE
        for anchor in (("begin", "end") if to_right else ("end", "begin"))
        for down in _LINES
    ]

    def badness(label: Label) -> tuple[bool, float, float]:
        box = label.box.grown(_GAP)
        across = _ACROSS if label.box.left < x - _GAP and label.box.right > x + _GAP else 0.0
        return _outside(label.box, inside), sum(map(box.overlap, taken)), label.box.distance(x, y) + across

    return min(places, key=badness)


def leader(label: Label, x: float, y: float) -> tuple[float, float] | None:
    """Where a line from the mark at (x, y) to its words ends; None where they are close enough to be known for its."""
    box = label.box
    if box.distance(x, y) <= _FAR:
        return None
    return round(min(max(x, box.left), box.right), 1), round(min(max(y, box.top), box.bottom), 1)


def _outside(box: Box, inside: Box) -> bool:
    return box.left < inside.left or box.right > inside.right or box.top < inside.top or box.bottom > inside.bottom
