"""The largest batch sizes that fit, as text: the result in two lines, and every size that was traced."""

from rich.table import Table
from rich.text import Text

from tightfit.planner.largest_batch_size import CLOSE_ENOUGH, BatchSize, BatchSizes
from tightfit.reports.text.estimates import console, fitted
from tightfit.reports.text.table_columns import Column
from tightfit.units import format_bytes, format_seconds


def write_batch_sizes(found: BatchSizes, *, elapsed_seconds: float) -> None:
    """Prints the result on stdout."""
    out = console()
    for line in answer(found):
        out.print(Text(line))
    out.print()
    out.print(_table(found, out.width))
    out.print()
    if any(row.techniques for row in found.tried):
        out.print(_techniques(found, out.width))
        out.print()
    out.print(Text(f"searched in {elapsed_seconds:.1f} s, {len(found.tried)} sizes", style="dim"))


def answer(found: BatchSizes) -> list[str]:
    """The largest sizes and the fastest, a line each."""
    name, budget = found.parameter, f"{format_bytes(found.budget_bytes)} on {found.device}"
    lines = [
        f"{name} {found.plain.size} is the largest that was found to fit {budget} without changes{_end(found, found.plain_too_large, found.plain.size)}"
        if found.plain
        else f"no {name} that was tried fits {budget} without changes{_end(found, found.plain_too_large)}"
    ]
    if found.num_examples is not None and found.num_examples in (row.size for row in found.tried):
        lines.append(f"the data set has {found.num_examples:,} examples: no larger {name} was tried")
    if found.planned is not None:
        more = "" if found.planned.size == found.num_examples else "; larger ones may fit"
        lines.append(
            f"{name} {found.planned.size} is the largest that was found to fit with {' + '.join(found.planned.techniques) or 'no technique'}{_end(found, found.planned_too_large) or more}"
        )
    else:
        lines.append(f"no larger one was found to fit with techniques{_end(found, found.planned_too_large)}")
    if found.is_interrupted:
        lines.append("the search was interrupted: this is the best so far")
    # The smallest size that fails is the one that explains why the search did not go further.
    if found.failed:
        size, why = min(found.failed.items())
        lines.append(f"{name} {size} does not run: {why}")
    if found.fastest is not None:
        with_what = f" with {' + '.join(found.fastest.techniques)}" if found.fastest.techniques else ""
        # The larger one of two that are alike is no better.
        is_first = all(row.seconds_per_sample >= found.fastest.seconds_per_sample for row in found.tried if row.fits)
        lines.append(
            f"{name} {found.fastest.size}{with_what} is {'the fastest' if is_first else 'as fast as any to within 1 %'}: {format_seconds(found.fastest.seconds_per_sample)} per sample (roofline estimate)"
        )
    return lines


def _end(found: BatchSizes, too_large: int | None, fits: int | None = None) -> str:
    if too_large is None:
        return ""
    # Of a size that does not run nobody knows whether it would fit.
    does_not = "does not run" if too_large in found.failed else "does not"
    # With techniques a size costs a whole plan, and the ends are further apart always.
    gap = 0 if fits is None else too_large - fits
    if gap > max(1, CLOSE_ENOUGH * too_large):
        return f" ({too_large} {does_not}; sizes between the two, {gap / too_large:.0%} of it, were not tried)"
    return f" ({too_large} {does_not})"


def _table(found: BatchSizes, width: int) -> Table:
    headings = (found.parameter, "peak GPU memory", "upper bound", "fits", "time per step", "per sample")
    columns = [Column(heading=heading, is_number=heading != "fits") for heading in headings]
    return fitted(columns, [_cells(row) for row in found.tried], width)


def _techniques(found: BatchSizes, width: int) -> Table:
    """Below the other table, beside which they would be cut in a terminal."""
    columns = [Column(heading=found.parameter, is_number=True), Column(heading="techniques", wraps=True)]
    rows = [(str(row.size), " + ".join(row.techniques)) for row in found.tried if row.techniques]
    return fitted(columns, rows, width)


def _cells(row: BatchSize) -> tuple[str, ...]:
    sizes = (format_bytes(row.device_bytes), format_bytes(row.device_high_bytes))
    seconds = (format_seconds(row.seconds_per_step), format_seconds(row.seconds_per_sample))
    return str(row.size), *sizes, "yes" if row.fits else "no", *seconds
