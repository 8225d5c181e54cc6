"""Pieces of HTML for a notebook: an estimate, and a whole report in a frame.

An estimate is the verdict, the peaks, what holds them as one bar, and who asked. It has no script and no class, so that it touches nothing else.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from tightfit.reports.advice import LABELS
from tightfit.reports.html.templates import render
from tightfit.reports.verdicts import named_phase, verdict_of_answer
from tightfit.tape import Coverage
from tightfit.units import format_bytes, format_seconds

_NUM_SITES = 8
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
_OTHER_COLOUR = "#b39ddb"
_FRAME_HEIGHT = 900


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A category at the peak: a piece of the bar that is `percent` of its length."""

    label: str
    num_bytes: int
    percent: float
    colour: str


def estimate_fragment(answer: Mapping[str, Any]) -> str:
    """The object that `tightfit estimate --json` prints as HTML whose styles touch nothing else; every text in it is escaped."""
    return render(
        "estimate.html",
        verdict=_verdict(answer),
        target=answer["target"],
        device=answer["device"]["name"],
        pieces=_pieces(answer),
        figures=_figures(answer),
        sites=[_site(holder) for holder in answer["holders"][:_NUM_SITES]],
    )


def _verdict(answer: Mapping[str, Any]) -> str:
    word, amount = verdict_of_answer(answer)
    not_seen = Coverage.from_json(answer["coverage"]).words if answer["fits"] else ""
    return f"{word}, {amount}{'; ' + not_seen if not_seen else ''}"


def framed_page(page: str) -> str:
    """A whole page in a frame of its own."""
    # srcdoc with a sandbox: the page's scripts run, but without access to the notebook's page, its cookies and its kernel.
    return render("frame.html", page=page, height=_FRAME_HEIGHT)


def _figures(answer: Mapping[str, Any]) -> list[tuple[str, str]]:
    peak, moment = answer["peak"], answer["moment"]
    parts = (moment["span"], named_phase(moment["phase"]), moment["module"], moment["line"])
    where = ", ".join(part for part in parts if part)
    figures = [
        (
            "peak GPU memory",
            f"{format_bytes(peak['device_bytes'])} of {format_bytes(answer['device']['capacity_bytes'])}",
        ),
        ("range of the peak", f"{format_bytes(peak['device_low_bytes'])} to {format_bytes(peak['device_high_bytes'])}"),
        ("reserved", format_bytes(peak["reserved_bytes"])),
        ("allocated", format_bytes(peak["allocated_bytes"])),
        ("time per step", format_seconds(answer["seconds_per_step"]) if answer["seconds_per_step"] else ""),
        ("peak at", where),
    ]
    return [(name, value) for name, value in figures if value]


def _pieces(answer: Mapping[str, Any]) -> list[Piece]:
    """Memory at the peak by category, as a bar as long as the GPU's capacity, or as the peak where that is more."""
    names = dict.fromkeys((*COLOURS, *answer["at_peak"]))
    held = {name: size for name in names if (size := answer["at_peak"].get(name, 0))}
    whole = max(answer["device"]["capacity_bytes"], sum(held.values()), 1)
    return [
        Piece(
            label=LABELS.get(name, name),
            num_bytes=size,
            percent=100 * size / whole,
            colour=COLOURS.get(name, _OTHER_COLOUR),
        )
        for name, size in held.items()
    ]


def _site(holder: Mapping[str, Any]) -> tuple[str, ...]:
    category = LABELS.get(holder["category"], holder["category"])
    operator = holder["operator"].removeprefix("aten.")
    return format_bytes(holder["num_bytes"]), category, holder["line"], holder["module"], operator
