"""The rows as CSV and as text."""

import csv
import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.plans.grid import Row

_GIB = float(1 << 30)


def load(path: Path) -> list[Row]:
    """The rows of a table that exists; none without it."""
    if not path.exists():
        return []
    kinds = {field.name: field.type for field in dataclasses.fields(Row)}
    read = {int: int, float: float, str: str, bool: lambda text: text == "True"}
    with path.open(newline="") as file:
        return [Row(**{name: read[kinds[name]](text) for name, text in line.items()}) for line in csv.DictReader(file)]


def save(path: Path, rows: Iterable[Row]) -> None:
    """Writes the table, whole or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in dataclasses.fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(dataclasses.asdict(row) for row in rows)
    partial.replace(path)


def lines(rows: Sequence[Row]) -> Iterable[str]:
    """The table for a terminal, a line for each row."""
    yield f"{'workload':16} {'budget':>16} {'at most':>10} {'a step':>10} {'':>8}  {'best baseline that fits':40} choices"
    for row in rows:
        name = row.name if row.kind == "plan" else ""
        budget = f"{name} {row.budget_bytes / _GIB:.2f}" if name else "-"
        slower = f"{row.seconds / row.plain_seconds - 1:+.1%}"
        other = f"{row.baseline} {row.baseline_seconds * 1e3:.1f} ms" if row.baseline else ("-" if name else row.name)
        if row.kind == "baseline" and not row.fits:
            yield f"{row.workload:16} {budget:>16} {row.name}: {row.wrong}"
            continue
        wrong = f"  !! {row.wrong}" if row.wrong else ""
        yield (
            f"{row.workload:16} {budget:>16} {row.high_bytes / _GIB:6.2f} GiB {row.seconds * 1e3:7.1f} ms {slower:>8}  "
            f"{other:40} {row.choices}{wrong}"
        )


def verdict(rows: Sequence[Row]) -> str:
    """The requirements for plans, and how many plans meet them."""
    plans = [row for row in rows if row.kind == "plan"]
    kept = sum(not row.wrong for row in plans)
    return f"{len({row.workload for row in plans})} workloads, {len(plans)} budgets: {kept} as asked, {len(plans) - kept} not"
