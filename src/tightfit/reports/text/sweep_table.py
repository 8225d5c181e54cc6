"""A sweep as text: a row for each combination of values, with the reason where one could not be traced."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from tightfit.reports.text.estimates import console, fitted
from tightfit.reports.text.table_columns import Column
from tightfit.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tightfit.reports.results import Estimate

Entry = tuple["Mapping[str, str]", str, "Estimate | None", str]
"""The values of a row, its GPU, and its estimate or the reason why there is none."""


def write_sweep(label: str, entries: Sequence[Entry], *, notes: Sequence[str] = (), elapsed_seconds: float) -> None:
    """Prints the table on stdout, and `notes` below it."""
    out = console()
    out.print(Text(label, style="bold"))
    out.print()
    out.print(_table(entries, out.width))
    out.print()
    for reason, rows in _reasons(entries).items():
        out.print(Text(f"{'; '.join(rows)}: {reason}"))
    for note in notes:
        out.print(Text(note))
    out.print(Text(f"estimated in {elapsed_seconds:.1f} s", style="dim"))


def _table(entries: Sequence[Entry], width: int) -> Table:
    has_cards = len({device for _, device, _, _ in entries}) > 1
    headings = ("peak GPU memory", "upper bound", "left", "fits", "time per step")
    columns = [Column(heading=name, is_number=True) for name in entries[0][0]]
    columns += [Column(heading="GPU")] if has_cards else []
    columns += [Column(heading=heading, is_number=heading != "fits") for heading in headings]
    rows = [
        (*values.values(), *([device.removeprefix("NVIDIA ")] if has_cards else []), *_figures(estimate))
        for values, device, estimate, _ in entries
    ]
    return fitted(columns, rows, width)


def _reasons(entries: Sequence[Entry]) -> dict[str, list[str]]:
    """Why rows could not be traced, each reason once, with the rows that it is of."""
    found: dict[str, list[str]] = {}
    for values, _, estimate, reason in entries:
        if estimate is None:
            found.setdefault(reason, []).append(", ".join(f"{name}={value}" for name, value in values.items()))
    return found


def _figures(estimate: "Estimate | None") -> tuple[str, ...]:
    if estimate is None:
        return ("-",) * 5
    peak = estimate.peak
    sizes = (peak.device_bytes, peak.device_high_bytes, estimate.headroom_bytes)
    seconds = format_seconds(estimate.seconds_per_step) if estimate.seconds_per_step else "-"
    return *map(format_bytes, sizes), "yes" if estimate.fits else "no", seconds
