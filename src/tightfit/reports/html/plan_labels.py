"""Places the words of marks in a picture so that they cover neither one another nor what they are about."""

import dataclasses
from collections.abc import Sequence
from typing import Self

# Of bold 14 px sans serif, the widest of the fonts that pages ask for (DejaVu Sans): the pixels of a mean character, and of a line.
_CHARACTER_WIDTH = 8.2
_ASCENT, _DESCENT = 13, 4
# How far below the middle of its mark a line of words may stand, the best first, and how far to the side of it the words begin.
_LINES = (-15, 25, -35, 45, 65, 85)
_BESIDE = 2


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
    """`words` above or below the mark at (x, y), towards the wider side or the other: the first place in `inside` that covers least of `taken`."""
    to_right = x <= (inside.left + inside.right) / 2
    places = [
        Label(
            words=words,
            x=round(x + (_BESIDE if anchor == "begin" else -_BESIDE), 1),
            y=round(y + down, 1),
            anchor=anchor,
        )
        for anchor in (("begin", "end") if to_right else ("end", "begin"))
        for down in _LINES
    ]
    return min(places, key=lambda label: (_outside(label.box, inside), sum(map(label.box.overlap, taken))))


def _outside(box: Box, inside: Box) -> bool:
    return box.left < inside.left or box.right > inside.right or box.top < inside.top or box.bottom > inside.bottom
