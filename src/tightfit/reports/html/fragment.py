"""An estimate as a piece of HTML for a notebook: the verdict, the peaks, what holds them as one bar, and who asked. No script, no class."""

import html
from collections.abc import Mapping
from typing import Any

from tightfit.reports.advice import LABELS
from tightfit.units import format_bytes, format_seconds

NUM_HOLDERS = 8
# After Okabe and Ito (2008), as in the report's page.
COLOURS = {
    "parameters": "#0072b2",
    "optimizer_state": "#cc79a7",
    "gradients": "#56b4e9",
    "inputs": "#009e73",
    "workspace": "#f0e442",
    "activations": "#e69f00",
    "temporaries": "#d55e00",
    "cache": "#c3c9cf",
    "context": "#7d8790",
}
_CELL = "padding:1px 14px 1px 0;text-align:left;white-space:nowrap"


def estimate_fragment(answer: Mapping[str, Any]) -> str:
    """The object that `tightfit estimate --json` prints as HTML whose styles touch nothing else; every text in it is escaped."""
    peak, device = answer["peak"], answer["device"]
    left = format_bytes(abs(answer["headroom_bytes"]))
    verdict = f"fits, {left} left" if answer["fits"] else f"does not fit, {left} too much"
    moment = answer["moment"]
    where = ", ".join(moment[key] for key in ("span", "phase", "module", "line") if moment[key])
    figures = [
        ("peak on the card", f"{format_bytes(peak['device_bytes'])} of {format_bytes(device['capacity_bytes'])}"),
        ("", f"{format_bytes(peak['device_low_bytes'])} to {format_bytes(peak['device_high_bytes'])}"),
        ("reserved", format_bytes(peak["reserved_bytes"])),
        ("allocated", format_bytes(peak["allocated_bytes"])),
        ("a step", format_seconds(answer["seconds_per_step"]) if answer["seconds_per_step"] else ""),
        ("peak reached in", where),
    ]
    holders = [_holder(holder) for holder in answer["holders"][:NUM_HOLDERS]]
    parts = [
        f"<div><b>{_text(verdict)}</b>: {_text(answer['target'])} on {_text(device['name'])}</div>",
        _bar(answer),
        _table([(name, value) for name, value in figures if value]),
        "<div>who asked for most of it</div>" if holders else "",
        _table(holders),
    ]
    return f'<div style="font-size:13px;line-height:1.5;max-width:1000px;overflow-x:auto;margin-bottom:14px">{"".join(parts)}</div>'


def _text(words: str) -> str:
    return html.escape(str(words))


def _bar(answer: Mapping[str, Any]) -> str:
    """What holds the card at the peak, as long as the card, with the names in its titles and below."""
    held = {name: answer["at_peak"].get(name, 0) for name in COLOURS if answer["at_peak"].get(name, 0)}
    whole = max(answer["device"]["capacity_bytes"], sum(held.values()), 1)
    pieces = "".join(
        f'<div title="{_text(LABELS.get(name, name))} {format_bytes(size)}"'
        f' style="width:{100 * size / whole:.3f}%;background:{COLOURS[name]}"></div>'
        for name, size in held.items()
    )
    names = "".join(
        f'<span style="white-space:nowrap;margin-right:14px"><span style="display:inline-block;width:10px;height:10px;'
        f'background:{COLOURS[name]};margin-right:5px"></span>{_text(LABELS.get(name, name))} {format_bytes(size)}</span> '
        for name, size in held.items()
    )
    frame = "display:flex;height:16px;border:1px solid #8b949e;margin:4px 0"
    return (
        f'<div style="{frame}" role="img" aria-label="what holds the card at the peak">{pieces}</div><div>{names}</div>'
    )


def _holder(holder: Mapping[str, Any]) -> tuple[str, ...]:
    category = LABELS.get(holder["category"], holder["category"])
    operator = holder["operator"].removeprefix("aten.")
    return format_bytes(holder["num_bytes"]), category, holder["line"], holder["module"], operator


def _table(rows: list[tuple[str, ...]]) -> str:
    cells = ("".join(f'<td style="{_CELL}">{_text(word)}</td>' for word in row) for row in rows)
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    return f'<table style="border-collapse:collapse;margin:6px 0;font-size:13px">{body}</table>' if rows else ""
