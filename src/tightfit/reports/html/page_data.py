"""What the HTML page holds, as one JSON object within a budget of bytes: the summary, the timeline, the tree, the table, and their texts.

Columns of numbers are written as differences to the number before, in the largest unit that divides them all, so that what does not change
costs two characters. Texts are written once and named by index. Where the whole is over the budget, it is cut half as fine until it fits.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from tightfit.reports.blocks_by_site import largest_blocks, line_and_function, module_name, places, stack_of
from tightfit.reports.downsampled_timeline import Detail, timeline
from tightfit.reports.html.inert_text import inert
from tightfit.reports.html.treemap import TreemapNode, peak_tree
from tightfit.reports.summary import Summary
from tightfit.reports.text.table_columns import shorten_middle
from tightfit.simulate.history import CATEGORIES, History, is_library_frame
from tightfit.tape import Column

MAX_BYTES = 2_600_000
_MAX_TEXT_LENGTH = 240
_MAX_FRAMES = 48


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much of everything the page holds."""

    detail: Detail = Detail()
    num_places: int = 1600
    num_blocks: int = 600
    num_spans: int = 1500
    num_assumptions: int = 200
    min_share: float = 0.0002

    def halved(self) -> "Limits":
        """Half as much of everything."""
        return Limits(
            detail=self.detail.halved(),
            num_places=self.num_places // 2,
            num_blocks=self.num_blocks // 2,
            num_spans=self.num_spans // 2,
            num_assumptions=self.num_assumptions // 2,
            min_share=self.min_share * 2,
        )


def page_json(history: History, summary: Summary, *, max_bytes: int = MAX_BYTES) -> str:
    """The page's data, of at most `max_bytes` characters of ASCII."""
    limits = Limits()
    while True:
        text = json.dumps(_page(history, summary, limits), separators=(",", ":"), ensure_ascii=True)
        if len(text) <= max_bytes:
            return text
        limits = limits.halved()


class _Texts:
    """Texts by index, each once and inert; very long ones lose their middle."""

    def __init__(self) -> None:
        self.index: dict[str, int] = {"": 0}

    def __call__(self, text: str) -> int:
        return self.index.setdefault(shorten_middle(inert(text), _MAX_TEXT_LENGTH), len(self.index))


def _page(history: History, summary: Summary, limits: Limits) -> dict[str, Any]:
    texts = _Texts()
    page = {
        "summary": _short_summary(summary, limits),
        "categories": CATEGORIES,
        "timeline": _timeline(history, limits, texts),
        "tree": _tree(peak_tree(history, limits.min_share), texts),
        **_table(history, limits, texts),
    }
    return page | {"texts": list(texts.index)}


def _short_summary(summary: Summary, limits: Limits) -> Mapping[str, Any]:
    """The summary without what the page holds elsewhere, and with no more than it can show; of too many steps the highest are kept."""
    plain = summary.to_json()
    del plain["places"]
    spans, merged = plain["spans"], _merged_assumptions(plain["assumptions"])
    highest = sorted(spans, key=lambda span: -span["peak_allocated_bytes"])[: limits.num_spans]
    plain["spans"] = sorted(highest, key=lambda span: span["begin"])
    plain["num_spans"] = len(spans)
    plain["assumptions"], plain["num_assumptions"] = merged[: limits.num_assumptions], len(merged)
    return _shortened(plain)


def _merged_assumptions(assumptions: list[dict[str, str]]) -> list[dict[str, Any]]:
    """What was assumed, once each, with up to three of its places."""
    wheres: dict[str, list[str]] = {}
    for assumption in assumptions:
        wheres.setdefault(assumption["what"], []).append(assumption["where"])
    return [{"what": what, "where": where[:3], "num_more": len(where[3:])} for what, where in wheres.items()]


def _shortened(value: Any) -> Any:
    """`value` with every text in it inert and cut to a length that a page can bear."""
    if isinstance(value, str):
        return shorten_middle(inert(value), _MAX_TEXT_LENGTH * 2)
    if isinstance(value, dict):
        return {_shortened(key): _shortened(part) for key, part in value.items()}
    return [_shortened(part) for part in value] if isinstance(value, list | tuple) else value


def _timeline(history: History, limits: Limits, texts: _Texts) -> dict[str, Any]:
    cut = timeline(history, limits.detail)
    columns = (cut.low, cut.reserved, *cut.by_category)
    unit = max(1, int(np.gcd.reduce(np.concatenate(columns)))) if len(cut.at) else 1
    used = [category for category, column in enumerate(cut.by_category) if column.any()]
    data: dict[str, Any] = {
        "unit": unit,
        "edges": _differences(cut.edges),
        "at": (cut.at - cut.edges[:-1]).tolist(),
        "low": _differences(cut.low // unit),
        "reserved": _differences(cut.reserved // unit),
        "levels": {str(category): _differences(cut.by_category[category] // unit) for category in used},
        "places": _differences(_allocation_sites(history, cut.block, texts)),
    }
    if len(history.time_us):
        last = len(history.time_us) - 1
        data["time_us"] = _differences(history.time_us[np.minimum(cut.edges, last)] - history.time_us[0])
    return data


def _allocation_sites(history: History, allocated: Column, texts: _Texts) -> Column:
    """For each bucket the text that names where the block of its peak was allocated: `train.py:41 forward, model.h.3`."""
    sites: dict[tuple[int, int], int] = {(-1, -1): 0}
    index = np.zeros(len(allocated), dtype=np.int64)
    for i in np.flatnonzero(allocated >= 0).tolist():
        block = int(allocated[i])
        key = (int(history.blocks.stack[block]), int(history.blocks.module[block]))
        if key not in sites:
            line, function = line_and_function(stack_of(history, key[0]))
            asked = " ".join(part for part in (line, function) if part)
            words = [asked, module_name(history, block)]
            sites[key] = texts(", ".join(word for word in words if word))
        index[i] = sites[key]
    return index


def _differences(column: Column) -> list[int]:
    return np.diff(column, prepend=np.zeros(1, dtype=column.dtype)).tolist()


def _tree(node: TreemapNode, texts: _Texts) -> list[Any]:
    """`[name, category that holds most, bytes, blocks]`, and a list of parts where there are any."""
    plain: list[Any] = [texts(node.label), node.main_category, node.num_bytes, node.num_blocks]
    return [*plain, [_tree(part, texts) for part in node.parts.values()]] if node.parts else plain


def _table(history: History, limits: Limits, texts: _Texts) -> dict[str, Any]:
    """Rows of places and of single blocks, and the stacks that they name by index."""
    stacks: dict[int, int] = {}

    def number(stack: int) -> int:
        return stacks.setdefault(stack, len(stacks))

    place_rows = [
        (
            *(row.category, texts(row.module), number(row.stack), row.peak_bytes, row.num_at_peak, row.largest_bytes),
            *(row.total_bytes, row.num_in_total),
        )
        for row in places(history, limits.num_places)
    ]
    block_rows = [
        (
            *(row.category, texts(row.module), number(row.stack), row.block_bytes, row.requested_bytes),
            *(row.allocated_at, row.freed_at),
        )
        for row in largest_blocks(history, limits.num_blocks)
    ]
    return {
        "places": place_rows,
        "blocks": block_rows,
        "stacks": [_stack(stack_of(history, stack), texts) for stack in stacks],
    }


def _stack(stack: tuple[str, ...], texts: _Texts) -> dict[str, Any]:
    """The user's line and function, the frames from the innermost out, and which of those are the user's own."""
    line, function = line_and_function(stack)
    shown = stack[:_MAX_FRAMES]
    return {
        "line": texts(line),
        "function": texts(function),
        "frames": [texts(frame) for frame in shown],
        "own": [i for i, frame in enumerate(shown) if not is_library_frame(frame)],
    }
