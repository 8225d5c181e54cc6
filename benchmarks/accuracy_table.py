"""The arithmetic of the accuracy benchmark: relative errors, percentiles, bands, slopes, a table and a CSV file.

An error is (estimated - measured) / measured. Rows that were excluded, for a reason written before any estimate was
looked at, and rows that could not be estimated are listed but enter no figure of the summary. No torch here.
"""

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One measured figure beside what was estimated for it; bytes, or bytes per item of a batch for a slope."""

    group: str
    name: str
    figure: str
    measured_bytes: float
    estimated_bytes: float | None = None
    low_bytes: float | None = None
    high_bytes: float | None = None
    baseline_bytes: float = 0
    excluded: str = ""
    fault: str = ""
    elapsed_seconds: float = 0.0
    others: Mapping[str, float] = field(default_factory=dict)

    @property
    def error(self) -> float | None:
        """Relative and signed; None where there is no estimate."""
        return None if self.estimated_bytes is None else self.estimated_bytes / self.measured_bytes - 1

    @property
    def is_inside(self) -> bool | None:
        """Whether the measurement lies in the band; None where there is no band."""
        if self.low_bytes is None or self.high_bytes is None:
            return None
        return self.low_bytes <= self.measured_bytes <= self.high_bytes

    @property
    def band_width(self) -> float | None:
        """The band's width relative to the measurement; None where there is no band."""
        if self.low_bytes is None or self.high_bytes is None:
            return None
        return (self.high_bytes - self.low_bytes) / self.measured_bytes

    def with_baseline(self) -> "Comparison":
        """The same row with the measurement counted from an empty card."""
        return replace(self, measured_bytes=self.measured_bytes + self.baseline_bytes, baseline_bytes=0)

    @property
    def counts(self) -> bool:
        """Whether this row enters the summary."""
        return self.estimated_bytes is not None and not self.excluded


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a set of errors looks like; shares are of the rows that count, nan where none has the figure."""

    num_rows: int
    num_compared: int
    median_error: float
    ninetieth_error: float
    ninety_fifth_error: float
    share_inside: float
    median_band_width: float
    share_under: float


def percentile(values: Iterable[float], share: float) -> float:
    """The value below which `share` (0 to 1) of `values` lie, linear between neighbours; nan of nothing.

    The definition is number 7 of Hyndman and Fan, "Sample Quantiles in Statistical Packages" (1996).
    """
    ordered = sorted(values)
    if not ordered:
        return math.nan
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def slope(points: Sequence[tuple[float, float]]) -> float:
    """The least-squares slope of y over x for `points` (x, y).

    Raises:
        ValueError: fewer than two different x.
    """
    mean_x = sum(x for x, _ in points) / max(len(points), 1)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    if spread == 0:
        raise ValueError("a slope needs points at two different x or more")
    return sum((x - mean_x) * y for x, y in points) / spread


def _share(flags: Sequence[bool]) -> float:
    return sum(flags) / len(flags) if flags else math.nan


def _summary(errors: Sequence[float], num_rows: int, inside: Sequence[bool], widths: Sequence[float]) -> Summary:
    sizes = [abs(error) for error in errors]
    return Summary(
        num_rows=num_rows,
        num_compared=len(errors),
        median_error=percentile(sizes, 0.5),
        ninetieth_error=percentile(sizes, 0.9),
        ninety_fifth_error=percentile(sizes, 0.95),
        share_inside=_share(inside),
        median_band_width=percentile(widths, 0.5),
        share_under=_share([error < 0 for error in errors]),
    )


def summarise(comparisons: Sequence[Comparison]) -> Summary:
    """The summary over the rows that count."""
    counted = [row for row in comparisons if row.counts]
    return _summary(
        [row.error for row in counted if row.error is not None],
        len(comparisons),
        [row.is_inside for row in counted if row.is_inside is not None],
        [row.band_width for row in counted if row.band_width is not None],
    )


def summarise_other(comparisons: Sequence[Comparison], tool: str) -> Summary:
    """The summary of another tool's figures over the rows that count here and that the tool has a figure for."""
    counted = [row for row in comparisons if row.counts and tool in row.others]
    return _summary([row.others[tool] / row.measured_bytes - 1 for row in counted], len(comparisons), [], [])


def summary_line(title: str, summary: Summary) -> str:
    """One line of text: how many rows, then the errors, the band and the share that was estimated too low."""

    def percent(value: float, digits: int = 2) -> str:
        return "-" if math.isnan(value) else f"{100 * value:.{digits}f} %"

    return (
        f"{title}: {summary.num_compared} of {summary.num_rows} rows; |error| median {percent(summary.median_error)}, "
        f"90th {percent(summary.ninetieth_error)}, 95th {percent(summary.ninety_fifth_error)}; "
        f"in the band {percent(summary.share_inside, 0)}, median width {percent(summary.median_band_width, 1)}; "
        f"under-estimated {percent(summary.share_under, 0)}"
    )


def _amount(value: float | None) -> str:
    return "-" if value is None else f"{value / 2**20:,.1f}"


def _signed(error: float | None) -> str:
    return "-" if error is None else f"{100 * error:+.2f} %"


def table(comparisons: Sequence[Comparison]) -> str:
    """The rows as aligned text, MiB; the last column says why a row does not count."""
    lines = [("row", "figure", "measured", "estimated", "error", "band", "in", "baseline", "error with it", "remark")]
    for row in comparisons:
        band = "-" if row.low_bytes is None else f"{_amount(row.low_bytes)} to {_amount(row.high_bytes)}"
        error, whole_error = _signed(row.error), _signed(row.with_baseline().error) if row.baseline_bytes else "-"
        inside = {None: "-", True: "yes", False: "no"}[row.is_inside]
        remark = row.fault or row.excluded
        lines.append(
            (
                row.name,
                row.figure,
                _amount(row.measured_bytes),
                _amount(row.estimated_bytes),
                error,
                band,
                inside,
                _amount(row.baseline_bytes or None),
                whole_error,
                remark,
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def report(group: str, comparisons: Sequence[Comparison]) -> str:
    """The table of a group, its summary, and the summaries of the other tools that have figures for it."""
    tools = sorted({tool for row in comparisons for tool in row.others})
    lines = [f"== {group}", table(comparisons), summary_line("tightfit", summarise(comparisons))]
    if any(row.baseline_bytes for row in comparisons):
        whole = [row.with_baseline() for row in comparisons]
        lines.append(summary_line("tightfit, baselines added to the measurements", summarise(whole)))
    lines += [summary_line(tool, summarise_other(comparisons, tool)) for tool in tools]
    return "\n".join(lines)


def write_csv(path: Path, comparisons: Sequence[Comparison], remarks: Mapping[str, str]) -> None:
    """Writes the rows to `path`, below `remarks` (versions, the command, the summary) as `# name: text` lines."""
    tools = sorted({tool for row in comparisons for tool in row.others})
    header = [
        "group",
        "name",
        "figure",
        "measured_bytes",
        "estimated_bytes",
        "error",
        "low_bytes",
        "high_bytes",
        "inside",
        "baseline_bytes",
        "error_with_baseline",
        "inside_with_baseline",
        "excluded",
        "fault",
        "elapsed_seconds",
        *(f"{tool}_bytes" for tool in tools),
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        for name, text in remarks.items():
            file.write(f"# {name}: {text}\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        for row in comparisons:
            error = "" if row.error is None else f"{row.error:.6f}"
            figures = [row.measured_bytes, row.estimated_bytes]
            cells = [*("" if figure is None else f"{figure:.0f}" for figure in figures), error]
            cells += ["" if figure is None else f"{figure:.0f}" for figure in (row.low_bytes, row.high_bytes)]
            whole = row.with_baseline()
            cells += ["" if row.is_inside is None else str(int(row.is_inside)), f"{row.baseline_bytes:.0f}"]
            cells += ["" if whole.error is None else f"{whole.error:.6f}"]
            cells += ["" if whole.is_inside is None else str(int(whole.is_inside)), row.excluded, row.fault]
            others = [f"{row.others[tool]:.0f}" if tool in row.others else "" for tool in tools]
            writer.writerow([row.group, row.name, row.figure, *cells, f"{row.elapsed_seconds:.2f}", *others])
