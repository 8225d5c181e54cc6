"""Estimates as text for a terminal: one GPU in full, or several GPUs in one table.

The verdict comes first, then the figures, memory at the peak by category, allocation sites, steps, and assumptions. The same renderables serve the
command line, `rich` in a library user's own program, and notebooks.
"""

import dataclasses
import io
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tightfit.reports.advice import LABELS, largest_allocations, to_try
from tightfit.reports.text.table_columns import (
    GAP,
    Column,
    fit_widths,
    shorten_middle,
    shorten_module,
    shorten_place,
    shortened,
)
from tightfit.reports.verdicts import named_phase, verdict_words
from tightfit.simulate.estimate import Estimate
from tightfit.tape import Assumption
from tightfit.units import SIGNS_IN_ASCII, format_bytes, format_range_of_seconds, format_seconds

# Wider than rich's 80, so that module paths stay readable in a log.
PIPED_WIDTH = 120
MAX_WIDTH = 160
TIMES_ARE_ESTIMATED = "times are estimates, without data loading and logging"
NUM_ASSUMPTIONS = 8
NUM_PLACES = 2
# Below these widths the least important column is left out rather than all of them shortened beyond recognition.
_WIDTH_FOR_OPERATORS = 110
_WIDTH_FOR_RANGES = 100
_MAX_FILE_CELLS = 28
_LABEL_CELLS = 16
_MIN_BAR_CELLS = 10
_VISIBLE_IDLE = 0.02
_NUM_CAUSES = 2
_WHOLE_RATE = 10
MAX_BAR_CELLS = 48

STYLES = {
    "parameters": "blue",
    "gradients": "cyan",
    "optimizer_state": "magenta",
    "activations": "yellow",
    "temporaries": "red",
    "inputs": "green",
}
_HOLDER_COLUMNS = (
    Column(heading="bytes", is_number=True),
    Column(heading="blocks", is_number=True),
    Column(heading="what"),
    Column(heading="your line", shorten=shorten_place, yields=3),
    Column(heading="module", shorten=shorten_module, least_width=16, yields=1),
    Column(heading="operator", shorten=shorten_middle, least_width=18, yields=2),
)


class EstimateText:
    """One estimate in full, as wide as the console that prints it."""

    def __init__(self, estimate: Estimate, *, elapsed_seconds: float | None = None) -> None:
        self._estimate = estimate
        self._elapsed_seconds = elapsed_seconds

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        estimate, width = self._estimate, min(options.max_width, MAX_WIDTH)
        yield Group(_verdict(estimate), _subject(estimate))
        yield ""
        yield _figures(estimate)
        if not estimate.fits:
            yield ""
            yield Text(f"largest: {largest_allocations(estimate)}\nto try:  {to_try(estimate)}")
            yield Text("or:      tightfit plan finds what makes it fit, without changing the program")
        yield ""
        yield category_table(estimate.at_peak, estimate.peak.device_bytes, width, is_ascii=options.ascii_only)
        if estimate.allocation_sites:
            yield ""
            yield _allocation_sites(estimate, width)
        if estimate.spans:
            yield ""
            yield _spans(estimate, width)
        yield from _small_print(estimate.assumptions, estimate, self._elapsed_seconds)


class ComparisonText:
    """Estimates of one workload for several GPUs, a row each, in the order given."""

    def __init__(self, estimates: Sequence[Estimate], *, elapsed_seconds: float | None = None) -> None:
        self._estimates = estimates
        self._elapsed_seconds = elapsed_seconds

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self._estimates[0].target, style="bold")
        yield ""
        yield _cards(self._estimates, min(options.max_width, MAX_WIDTH))
        assumptions = dict.fromkeys(a for e in self._estimates for a in e.assumptions)
        yield from _small_print(tuple(assumptions), self._estimates[0], self._elapsed_seconds)


def write_estimate(estimate: Estimate, *, elapsed_seconds: float) -> None:
    """Prints one estimate in full on stdout."""
    console().print(EstimateText(estimate, elapsed_seconds=elapsed_seconds))


def write_comparison(estimates: Sequence[Estimate], *, elapsed_seconds: float) -> None:
    """Prints one table of several GPUs on stdout."""
    console().print(ComparisonText(estimates, elapsed_seconds=elapsed_seconds))


def console() -> Console:
    """The console for stdout: as wide as the terminal, or `PIPED_WIDTH` where there is none."""
    if isinstance(sys.stdout, io.TextIOWrapper) and not sys.stdout.encoding.lower().startswith("utf"):
        # Bars and signs are no reason to fail under LANG=C or an old Windows code page.
        sys.stdout.reconfigure(errors=SIGNS_IN_ASCII)
    # rich takes 80 columns without a terminal, and would cut the tables in a file or a pipe.
    return Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else PIPED_WIDTH)


def _verdict_style(estimate: Estimate) -> str:
    word = verdict_words(estimate)[0]
    return "bold green" if word == "fits" else "bold yellow" if estimate.fits else "bold red"


def _verdict(estimate: Estimate) -> Text:
    word, amount = verdict_words(estimate)
    seen = f"; {estimate.coverage.words}" if estimate.fits and estimate.coverage.words else ""
    return Text.assemble((word, _verdict_style(estimate)), f": {amount}{seen}")


def _subject(estimate: Estimate) -> Text:
    return Text.assemble(
        (estimate.target, "bold"), " on ", (estimate.device, "bold"), f", {format_bytes(estimate.capacity_bytes)}"
    )


def _time(estimate: Estimate) -> str:
    likely, band, idle = estimate.seconds_per_step, estimate.seconds_band, estimate.idle_seconds_per_step
    parts = ["estimated time"]
    if band is not None:
        ends = format_range_of_seconds(likely, band.low_seconds, band.high_seconds)
        parts = [f"({ends}) {', '.join(['estimated time', *band.largest_causes(_NUM_CAUSES)])}"]
    if idle >= _VISIBLE_IDLE * likely:
        parts.append(f"the GPU is idle for {format_seconds(idle)} of it, waiting for the host or for copies")
    return "; ".join(parts)


def _throughput(estimate: Estimate) -> tuple[str, str] | None:
    """Tokens or samples per second, and model FLOPs utilisation, as far as they can be told."""
    counts = estimate.counts
    if counts is None:
        return None
    of_peak = f"{counts.utilisation:.0%} of the peak FLOP/s (MFU)" if counts.utilisation is not None else ""
    known = ((counts.num_tokens, "tokens"), (counts.num_samples, "samples"), (counts.num_examples, "examples"))
    for count, name in known:
        rate = estimate.per_second(count)
        if rate is not None:
            return f"{rate:,.0f} {name}/s" if rate >= _WHOLE_RATE else f"{rate:.2g} {name}/s", of_peak
    return None


def _input_pipeline(estimate: Estimate) -> Iterator[tuple[str, str, str]]:
    """What loading batches and waiting for their copies take, where that is worth a line."""
    pipeline = estimate.input_pipeline
    least = _VISIBLE_IDLE * estimate.seconds_per_step
    if pipeline is None:
        return
    for cost in pipeline.loaders:
        if cost.load_seconds >= least:
            workers = f"{cost.use.num_workers} workers" if cost.use.num_workers else "the main process"
            step = format_seconds(pipeline.with_loading_seconds)
            yield (
                "data loading",
                format_seconds(cost.load_seconds),
                f"per step on this machine, in {workers} ({cost.use.line}); {step} per step with it",
            )
    waits = pipeline.step_seconds - pipeline.async_seconds
    if waits >= least:
        what = f"{format_bytes(pipeline.copied_bytes)} of batches ({pipeline.copy_line})"
        # Most of it is seldom the copy: it begins when the GPU has done what it was given before.
        yield (
            "waits at copies",
            format_seconds(waits),
            f"of each step: the host waits until the GPU has finished its work and copied {what}",
        )


def _host_memory(estimate: Estimate) -> str:
    if not estimate.pinned_peak_bytes:
        return "in tensors"
    pinned, tensors = format_bytes(estimate.pinned_peak_bytes), format_bytes(estimate.pinned_tensor_bytes)
    return f"in tensors; {pinned} of it pinned, in blocks of powers of two for tensors of {tensors}"


def _figures(estimate: Estimate) -> Group:
    """The three peaks, host memory, time per step and the time step of the peak, one per line."""
    peak, moment = estimate.peak, estimate.moment
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, GAP, 0, 0))
    table.add_column(no_wrap=True, min_width=_LABEL_CELLS)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold", style="dim")
    table.add_row("peak GPU memory", Text(format_bytes(peak.device_bytes), style="bold"), _range(estimate))
    table.add_row("reserved", format_bytes(peak.reserved_bytes), "by torch's caching allocator")
    table.add_row("allocated", format_bytes(peak.allocated_bytes), "by live tensors")
    if estimate.host_peak_bytes:
        table.add_row("host memory", format_bytes(estimate.host_peak_bytes), _host_memory(estimate))
    if estimate.seconds_per_step:
        table.add_row("time per step", format_seconds(estimate.seconds_per_step), _time(estimate))
    throughput = _throughput(estimate)
    if throughput is not None:
        table.add_row("throughput", *throughput)
    for row in _input_pipeline(estimate):
        table.add_row(*row)
    parts = [moment.span, named_phase(moment.phase), moment.operator.removeprefix("aten."), moment.module, moment.line]
    where = Table.grid(padding=(0, GAP, 0, 0))
    where.add_column(no_wrap=True, min_width=_LABEL_CELLS)
    where.add_column(overflow="fold")
    where.add_row("peak at", ", ".join(part for part in parts if part))
    return Group(table, where)


def _range(estimate: Estimate) -> str:
    peak = estimate.peak
    causes = [band.cause for band in estimate.band if band.less_bytes or band.more_bytes]
    if not causes:
        return ""
    return f"{format_bytes(peak.device_low_bytes)} to {format_bytes(peak.device_high_bytes)} ({', '.join(causes)})"


def share_words(part: int, whole: int) -> str:
    """`part` of `whole` in percent."""
    percent = 100 * part / whole
    # 0 % would say that there is none.
    return "<1%" if percent < 1 else f"{percent:.0f}%"


def bar(share: float, cells: int, *, is_ascii: bool = False) -> str:
    """`share` of `cells` as a bar, to an eighth of a cell; at least an eighth, so that every category shows."""
    if is_ascii:
        return "#" * max(1, round(share * cells))
    whole, eighths = divmod(max(1, round(share * cells * 8)), 8)
    return "█" * whole + " ▏▎▍▌▋▊▉"[eighths].strip()


def category_table(at_peak: Mapping[str, int], total_bytes: int, width: int, *, is_ascii: bool) -> Table:
    """Memory at the peak by category, each with its share of `total_bytes` and a bar, scaled to the largest."""
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, GAP, 0, 0))
    table.title, table.title_justify, table.title_style = "memory at the peak, by category", "left", "bold"
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    shown = {name: num_bytes for name, num_bytes in at_peak.items() if num_bytes}
    # Bars are scaled to the largest category: scaled to the whole, most would be a cell wide.
    total, most = max(1, total_bytes), max(shown.values(), default=1)
    # 42 cells are about what the other three columns take.
    cells = min(MAX_BAR_CELLS, width - 42)
    # In a narrow terminal figures are worth more than bars: rich would cut both.
    has_bars = cells >= _MIN_BAR_CELLS
    for name, num_bytes in shown.items():
        row: list[str | Text] = [LABELS.get(name, name.replace("_", " ")), format_bytes(num_bytes)]
        row.append(share_words(num_bytes, total))
        if has_bars:
            style = STYLES.get(name, "bright_black")
            row.append(Text(bar(num_bytes / most, cells, is_ascii=is_ascii), style=style))
        table.add_row(*row)
    return table


def fitted(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    width: int,
    *,
    title: str | None = None,
    styles: Sequence[Sequence[str]] | None = None,
) -> Table:
    """A table of `rows` within `width` cells; `styles` has one per cell. Where the columns do not fit beside each other, each row is a paragraph."""
    widths = fit_widths(columns, rows, width)
    if sum(widths) + GAP * (len(widths) - 1) > width:
        return _paragraphs(columns, rows, title)
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), title=title, title_justify="left")
    table.title_style, table.header_style = "bold", "dim"
    for column, cells in zip(columns, widths, strict=True):
        justify: Literal["left", "right"] = "right" if column.is_number else "left"
        # A long path in a column that wraps is folded; rich would cut it with an ellipsis.
        table.add_column(
            column.heading,
            justify=justify,
            no_wrap=not column.wraps,
            min_width=cells,
            max_width=cells if column.wraps else None,
            overflow="fold" if column.wraps else "ellipsis",
        )
    plain = [[""] * len(columns)] * len(rows)
    for cells, cell_styles in zip(shortened(columns, rows, widths), styles or plain, strict=True):
        table.add_row(*(Text(cell, style=style) for cell, style in zip(cells, cell_styles, strict=True)))
    return table


def _paragraphs(columns: Sequence[Column], rows: Sequence[Sequence[str]], title: str | None) -> Table:
    """The rows, each with its first cell on a line and the others after their headings below it: rich would cut the last columns."""
    table = Table.grid()
    table.title, table.title_justify, table.title_style = title, "left", "bold"
    table.add_column(overflow="fold")
    for first, *others in rows:
        cells = [(c.heading, cell) for c, cell in zip(columns[1:], others, strict=True) if cell]
        # A number alone does not say of what.
        table.add_row(Text(f"{columns[0].heading} {first}" if columns[0].is_number else first))
        table.add_row(Padding(Text("; ".join(f"{heading} {cell}".strip() for heading, cell in cells)), (0, 0, 0, GAP)))
    return table


def _allocation_sites(estimate: Estimate, width: int) -> Table:
    rows = [
        (
            format_bytes(site.num_bytes),
            str(site.num_storages),
            LABELS.get(site.category, site.category),
            site.line,
            site.module,
            site.operator.removeprefix("aten."),
        )
        for site in estimate.allocation_sites
    ]
    # The file and the line must stay whole: they are what a reader looks for.
    file_cells = max(len(site.line.rpartition("/")[2]) for site in estimate.allocation_sites)
    last = len(_HOLDER_COLUMNS) if width >= _WIDTH_FOR_OPERATORS else len(_HOLDER_COLUMNS) - 1
    shown = [i for i in range(last) if any(row[i] for row in rows)]
    columns = [
        dataclasses.replace(column, least_width=min(file_cells, _MAX_FILE_CELLS))
        if column.shorten is shorten_place
        else column
        for column in (_HOLDER_COLUMNS[i] for i in shown)
    ]
    rows = [tuple(row[i] for i in shown) for row in rows]
    return fitted(columns, rows, width, title="top allocation sites")


def _spans(estimate: Estimate, width: int) -> Table:
    headings = ("peak allocated", "peak reserved", "still allocated after the step")
    columns = [Column(heading="", wraps=True, least_width=12)]
    columns += [Column(heading=heading, is_number=True) for heading in headings]
    rows = [
        (
            span.name,
            *(format_bytes(n) for n in (span.peak_allocated_bytes, span.peak_reserved_bytes, span.end_allocated_bytes)),
        )
        for span in estimate.spans
        if span.peak_reserved_bytes
    ]
    return fitted(columns, rows, width, title="step by step")


def _cards(estimates: Sequence[Estimate], width: int) -> Table:
    """A row per GPU; the range is left out in a narrow terminal."""
    has_range = width >= _WIDTH_FOR_RANGES
    columns = [Column(heading="GPU", shorten=shorten_middle, least_width=12), Column(heading="")]
    headings = ("capacity", "peak", *(("lower bound", "upper bound") if has_range else ()), "left", "time per step")
    columns += [Column(heading=heading, is_number=True) for heading in headings]
    rows = []
    for estimate in estimates:
        peak = estimate.peak
        ends = (peak.device_low_bytes, peak.device_high_bytes) if has_range else ()
        sizes = (estimate.capacity_bytes, peak.device_bytes, *ends, estimate.headroom_bytes)
        rows.append(
            (
                estimate.device.removeprefix("NVIDIA "),
                # Shorter than in the answer for one GPU, so that names need not be cut.
                verdict_words(estimate)[0].replace("the safety margin", "margin"),
                *map(format_bytes, sizes),
                format_seconds(estimate.seconds_per_step) if estimate.seconds_per_step else "-",
            )
        )
    styles = [["", _verdict_style(e), *[""] * (len(columns) - 2)] for e in estimates]
    return fitted(columns, rows, width, styles=styles)


def _small_print(
    assumptions: Sequence[Assumption], estimate: Estimate, elapsed_seconds: float | None
) -> Iterator[Text | str]:
    """The assumptions, each once with its places, and the versions of the libraries."""
    places: dict[str, list[str]] = {}
    for assumption in assumptions:
        places.setdefault(assumption.what, []).append(assumption.where)
    if places:
        yield ""
        yield Text("assumptions", style="bold")
    for what, where in list(places.items())[:NUM_ASSUMPTIONS]:
        named = ", ".join(where[:NUM_PLACES])
        more = f" and {len(where) - NUM_PLACES} more places" if len(where) > NUM_PLACES else ""
        yield Text(f"- {what} ({named}{more})" if named else f"- {what}")
    if len(places) > NUM_ASSUMPTIONS:
        yield Text(f"- and {len(places) - NUM_ASSUMPTIONS} more (--json lists all)")
    versions = ", ".join(f"{name} {version}" for name, version in estimate.versions.items() if version)
    took = f"; estimated in {elapsed_seconds:.1f} s" if elapsed_seconds is not None else ""
    yield ""
    if estimate.seconds_per_step:
        yield Text(TIMES_ARE_ESTIMATED, style="dim")
    yield Text(f"with {versions}{took}", style="dim")
