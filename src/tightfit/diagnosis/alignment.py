"""Aligns two sequences (of sizes or of allocation sites): where they are equal and where they diverge, with insertions on either side.

At each difference the smallest shift is searched after which several entries in a row are equal again; a single one says little, as sizes repeat
a lot in a training step. The search is bounded, and so is the time: past a difference that is too large, nothing is aligned any more.
"""

import dataclasses
from collections.abc import Hashable, Sequence

# A training step asks for the same few sizes over and over: six equal ones in a row are hardly ever a coincidence.
RUN = 6
# The search is quadratic in the shift; a model's block has some hundred allocations.
WINDOW = 1024


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AlignedRange:
    """`a[a_begin:a_end]` corresponds to `b[b_begin:b_end]`; they are equal or differ."""

    is_same: bool
    a_begin: int
    a_end: int
    b_begin: int
    b_end: int


def align(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[AlignedRange]:
    """Ranges that cover both sequences in order, equal and different ones in turn; none is empty on both sides."""
    found: list[AlignedRange] = []
    at_a = at_b = 0
    while at_a < len(a) or at_b < len(b):
        # Greedy: equal entries are paired at once. It is linear where the runs agree, which is nearly everywhere.
        num_same = 0
        while at_a + num_same < len(a) and at_b + num_same < len(b) and a[at_a + num_same] == b[at_b + num_same]:
            num_same += 1
        if num_same:
            found.append(_stretch(True, at_a, at_a + num_same, at_b, at_b + num_same))
            at_a, at_b = at_a + num_same, at_b + num_same
            continue
        to_a, to_b = _resume(a, b, at_a, at_b)
        found.append(_stretch(False, at_a, to_a, at_b, to_b))
        at_a, at_b = to_a, to_b
    return found


def _stretch(is_same: bool, a_begin: int, a_end: int, b_begin: int, b_end: int) -> AlignedRange:
    return AlignedRange(is_same=is_same, a_begin=a_begin, a_end=a_end, b_begin=b_begin, b_end=b_end)


def _resume(a: Sequence[Hashable], b: Sequence[Hashable], at_a: int, at_b: int) -> tuple[int, int]:
    """The nearest positions from which both continue alike, or both ends."""
    for shift in range(1, WINDOW + 1):
        # What is replaced is left out on both sides in equal parts, so the even splits are looked at first.
        for skip in sorted(range(shift + 1), key=lambda skip: abs(2 * skip - shift)):
            to_a, to_b = at_a + skip, at_b + shift - skip
            if _goes_on(a, b, to_a, to_b):
                return to_a, to_b
    return len(a), len(b)


def _goes_on(a: Sequence[Hashable], b: Sequence[Hashable], to_a: int, to_b: int) -> bool:
    if to_a >= len(a) or to_b >= len(b):
        return to_a == len(a) and to_b == len(b)
    if a[to_a] != b[to_b]:
        return False
    # Near the end fewer than RUN entries are left to compare.
    left = min(RUN, len(a) - to_a, len(b) - to_b)
    return a[to_a : to_a + left] == b[to_b : to_b + left]
