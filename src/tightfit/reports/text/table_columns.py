"""Columns of text that fit a terminal: which ones shrink when it is narrow, and how names are shortened without becoming ambiguous.

A module path keeps its end (`….h.*.mlp.act`), a place in a file keeps its name and line (`…/train.py:41`), other texts lose their middle.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

GAP = 2

Shorten = Callable[[str, int], str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column. Without `shorten` or `wraps` it never shrinks; with them, down to `least_width` cells, columns of higher `yields` first.

    `shorten` leaves a part of a text out; with `wraps` a text goes on in further lines and nothing is left out; its words are broken only where
    the other columns are at their least.
    """

    heading: str
    is_number: bool = False
    shorten: Shorten | None = None
    least_width: int = 0
    yields: int = 0
    wraps: bool = False


def shorten_middle(text: str, width: int) -> str:
    """`text` in at most `width` cells, its middle replaced by `…` if it is longer."""
    if len(text) <= width:
        return text
    head = (width - 1) // 2
    tail = width - 1 - head
    return f"{text[:head]}…{text[len(text) - tail :]}"


def shorten_module(path: str, width: int) -> str:
    """A dotted module path in at most `width` cells: whole components are left out from its start, which all its neighbours share."""
    return _keep_the_end(path, ".", width)


def shorten_place(place: str, width: int) -> str:
    """`folder/file.py:41` in at most `width` cells: folders are left out first."""
    return _keep_the_end(place, "/", width)


def _keep_the_end(text: str, separator: str, width: int) -> str:
    if len(text) <= width:
        return text
    parts = text.split(separator)
    # The longest tail that fits comes first.
    tails = (f"…{separator}{separator.join(parts[i:])}" for i in range(1, len(parts)))
    return next((tail for tail in tails if len(tail) <= width), shorten_middle(parts[-1], width))


def fit_widths(columns: Sequence[Column], rows: Sequence[Sequence[str]], total_width: int) -> list[int]:
    """The width of each column in cells, so that all of them with gaps fit `total_width` as far as they may be shortened."""
    widths = [max([len(column.heading), *(len(row[i]) for row in rows)]) for i, column in enumerate(columns)]
    excess = sum(widths) + GAP * (len(columns) - 1) - total_width
    # One column after the other, the least important first: the others keep their full width as long as possible.
    for i in sorted(range(len(columns)), key=lambda i: -columns[i].yields):
        shorten, least = columns[i].shorten, max(columns[i].least_width, len(columns[i].heading))
        if excess > 0 and columns[i].wraps and widths[i] > least:
            # Names stay whole: others are shortened before these are broken.
            width = max(least, _longest_word(row[i] for row in rows), widths[i] - excess)
            width = min(width, widths[i])
            excess -= widths[i] - width
            widths[i] = width
        elif excess > 0 and shorten is not None and widths[i] > least:
            # Text cut at a dot or slash can come out shorter than necessary; the next columns keep what that frees.
            width = max(least, widths[i] - excess)
            kept = max([len(columns[i].heading), *(len(shorten(row[i], width)) for row in rows)])
            excess -= widths[i] - kept
            widths[i] = kept
    for i, column in enumerate(columns):
        if excess > 0 and column.wraps:
            width = min(widths[i], max(column.least_width, len(column.heading), widths[i] - excess))
            excess -= widths[i] - width
            widths[i] = width
    # What such a cut has freed beyond need is for the texts that go on in further lines.
    for i in sorted(range(len(columns)), key=lambda i: columns[i].yields):
        if excess < 0 and columns[i].wraps:
            more = min(-excess, max(len(row[i]) for row in rows) - widths[i])
            widths[i] += max(0, more)
            excess += max(0, more)
    return widths


def _longest_word(texts: Iterable[str]) -> int:
    return max((len(word) for text in texts for word in text.split()), default=0)


def shortened(columns: Sequence[Column], rows: Sequence[Sequence[str]], widths: Sequence[int]) -> list[list[str]]:
    """The cells of `rows`, each within the width of its column where that column may be shortened."""
    return [
        [
            column.shorten(cell, width) if column.shorten is not None else cell
            for column, cell, width in zip(columns, row, widths, strict=True)
        ]
        for row in rows
    ]
