"""A sweep as text: a row for each combination of values, with the reason where one could not be traced."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from tightfit.reports.text.estimates import console
from tightfit.reports.text.table_columns import GAP
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
    out.print(_table(entries))
    out.print()
    for note in notes:
        out.print(Text(note))
    out.print(Text(f"estimated in {elapsed_seconds:.1f} s", style="dim"))


def _table(entries: Sequence[Entry]) -> Table:
    names = list(entries[0][0])
    has_cards = len({device for _, device, _, _ in entries}) > 1
    has_failed = any(estimate is None for _, _, estimate, _ in entries)
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="dim")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    if has_cards:
        table.add_column("GPU", no_wrap=True)
    for heading in ("peak GPU memory", "upper bound", "left", "fits", "time per step"):
        table.add_column(heading, justify="left" if heading == "fits" else "right", no_wrap=True)
    if has_failed:
        table.add_column("reason")
    for values, device, estimate, reason in entries:
        cells = [*values.values(), *([device.removeprefix("NVIDIA ")] if has_cards else []), *_figures(estimate)]
        table.add_row(*map(Text, [*cells, *([reason] if has_failed else [])]))
    return table


def _figures(estimate: "Estimate | None") -> tuple[str, ...]:
    if estimate is None:
        return ("-",) * 5
    peak = estimate.peak
    sizes = (peak.device_bytes, peak.device_high_bytes, estimate.headroom_bytes)
    seconds = format_seconds(estimate.seconds_per_step) if estimate.seconds_per_step else "-"
    return *map(format_bytes, sizes), "yes" if estimate.fits else "no", seconds
