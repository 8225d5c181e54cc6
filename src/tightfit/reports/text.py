"""Estimates as text for a terminal: one card in full, or several cards in one table."""

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from tightfit.simulate.estimate import Estimate
from tightfit.units import format_bytes, format_seconds

BAR_CELLS = 28
NUM_ASSUMPTIONS = 8
PLAIN_WIDTH = 110

_LABELS = {"optimizer_state": "optimizer state", "cache": "cache (reserved, unused)"}
_STYLES = {
    "parameters": "blue",
    "gradients": "cyan",
    "optimizer_state": "magenta",
    "activations": "yellow",
    "temporaries": "bright_black",
    "inputs": "green",
    "workspace": "bright_black",
    "cache": "bright_black",
    "context": "bright_black",
}


def _console() -> Console:
    width = None if sys.stdout.isatty() else PLAIN_WIDTH
    return Console(file=sys.stdout, highlight=False, width=width, soft_wrap=False)


def write_estimate(estimate: Estimate, *, elapsed_seconds: float) -> None:
    """Prints one estimate in full on stdout."""
    console = _console()
    console.print(
        f"[bold]{estimate.target}[/] on [bold]{estimate.device}[/] ({format_bytes(estimate.capacity_bytes)})\n"
    )
    console.print(_verdict(estimate))
    peak = estimate.peak
    console.print(
        f"peak on the card [bold]{format_bytes(peak.device_bytes)}[/] "
        f"({format_bytes(peak.device_low_bytes)} to {format_bytes(peak.device_high_bytes)}); "
        f"reserved {format_bytes(peak.reserved_bytes)}, allocated {format_bytes(peak.allocated_bytes)}"
    )
    moment = estimate.moment
    place = " ".join(part for part in (moment.module, f"({moment.line})" if moment.line else "") if part)
    console.print(f"reached in {moment.span}, {moment.phase}, at {moment.operator} {place}".rstrip())
    console.print(
        f"a step takes about {format_seconds(estimate.seconds_per_step)}; the host holds {format_bytes(estimate.host_peak_bytes)} in tensors\n"
    )
    console.print(_categories(estimate))
    console.print()
    console.print(_holders(estimate))
    console.print()
    console.print(_spans(estimate))
    _write_small_print(console, estimate, elapsed_seconds)


def write_comparison(estimates: Sequence[Estimate], *, elapsed_seconds: float) -> None:
    """Prints one table of several cards on stdout."""
    console = _console()
    console.print(f"[bold]{estimates[0].target}[/]\n")
    table = Table(box=None, pad_edge=False)
    for heading in ("card", "holds", "peak on the card", "band", "left", "step", ""):
        table.add_column(heading, justify="left" if heading in ("card", "") else "right")
    for estimate in estimates:
        peak = estimate.peak
        table.add_row(
            estimate.device,
            format_bytes(estimate.capacity_bytes),
            format_bytes(peak.device_bytes),
            f"{format_bytes(peak.device_low_bytes)} to {format_bytes(peak.device_high_bytes)}",
            format_bytes(estimate.headroom_bytes),
            format_seconds(estimate.seconds_per_step),
            "[green]fits[/]" if estimate.fits else "[red]does not fit[/]",
        )
    console.print(table)
    _write_small_print(console, estimates[0], elapsed_seconds)


def _verdict(estimate: Estimate) -> str:
    if not estimate.fits:
        return f"[bold red]does not fit[/]: {format_bytes(-estimate.headroom_bytes)} too much"
    if estimate.peak.device_high_bytes > estimate.capacity_bytes:
        return (
            f"[bold yellow]fits, barely[/]: {format_bytes(estimate.headroom_bytes)} left, less than the doubt about it"
        )
    return f"[bold green]fits[/]: {format_bytes(estimate.headroom_bytes)} left"


def _categories(estimate: Estimate) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_column()
    total = max(1, estimate.peak.device_bytes)
    for name, num_bytes in estimate.at_peak.items():
        if num_bytes:
            share = num_bytes / total
            bar = "█" * max(1, round(share * BAR_CELLS))
            table.add_row(
                _LABELS.get(name, name), format_bytes(num_bytes), f"{share:.0%}", f"[{_STYLES[name]}]{bar}[/]"
            )
    return table


def _holders(estimate: Estimate) -> Table:
    table = Table(
        box=None, pad_edge=False, title="largest holders at the peak", title_justify="left", title_style="bold"
    )
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("blocks", justify="right")
    table.add_column("what", no_wrap=True)
    table.add_column("module", overflow="fold")
    table.add_column("operator", overflow="fold")
    table.add_column("your line", overflow="fold")
    for holder in estimate.holders:
        category = _LABELS.get(holder.category, holder.category)
        table.add_row(
            format_bytes(holder.num_bytes),
            str(holder.num_storages),
            category,
            holder.module,
            holder.operator,
            holder.line,
        )
    return table


def _spans(estimate: Estimate) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("", "peak allocated", "peak reserved", "left at its end"):
        table.add_column(heading, justify="left" if not heading else "right")
    for span in estimate.spans:
        table.add_row(
            span.name,
            *(format_bytes(n) for n in (span.peak_allocated_bytes, span.peak_reserved_bytes, span.end_allocated_bytes)),
        )
    return table


def _write_small_print(console: Console, estimate: Estimate, elapsed_seconds: float) -> None:
    if estimate.assumptions:
        console.print("\n[bold]assumptions[/]")
        for assumption in estimate.assumptions[:NUM_ASSUMPTIONS]:
            console.print(f"  {assumption.where}: {assumption.what}")
        if len(estimate.assumptions) > NUM_ASSUMPTIONS:
            console.print(f"  and {len(estimate.assumptions) - NUM_ASSUMPTIONS} more (--json lists all)")
    versions = ", ".join(f"{name} {version}" for name, version in estimate.versions.items() if version)
    console.print(f"\n[dim]with {versions}; estimated in {elapsed_seconds:.1f} s[/]")
