"""A plan of a layout as text: the layout, its memory by class and seconds by cause, the next ones, and why others do not fit."""

import sys

from rich.table import Table
from rich.text import Text

from tightfit.layouts.answers.layout_costs import LayoutCost
from tightfit.layouts.answers.layout_plan import LayoutPlan, PricedLayout
from tightfit.layouts.layout import Layout
from tightfit.reports.text.estimates import console, fitted
from tightfit.reports.text.table_columns import GAP, Column
from tightfit.units import format_bytes, format_seconds


def write_layout(plan: LayoutPlan, *, elapsed_seconds: float) -> None:
    """Prints the plan on stdout."""
    out = console()
    unit = "tokens" if plan.tokens_per_example else "samples"
    if plan.best is None:
        out.print(
            Text(
                f"no layout fits {plan.num_gpus} x {plan.device}, {format_bytes(plan.budget_bytes)} each", style="bold"
            )
        )
    else:
        best = plan.best
        out.print(Text(str(best.layout), style="bold"))
        out.print(
            Text(
                f"{best.layout.num_gpus} of {plan.num_gpus} x {plan.device} ({plan.node}), global batch {plan.examples}"
            )
        )
        out.print(Text(_batches(best.layout)))
        out.print(Text(f"{format_seconds(best.seconds.total)} per step, {plan.rate(best):,.0f} {unit}/s"))
        if plan.cost is not None:
            out.print(Text(cost_in_words(plan.cost, unit)))
        out.print(
            Text(
                "  " + ", ".join(f"{name} {format_seconds(s)}" for name, s in best.seconds.parts().items() if s > 0),
                style="dim",
            )
        )
        out.print()
        out.print(Text("memory per rank, by class"))
        out.print(_memory(best))
    unfit = "do not fit, even with full recomputation" + ("" if plan.best else "; those with the least memory")
    for heading, rows in (("next", plan.alternatives), (unfit, plan.refused)):
        if rows:
            out.print()
            out.print(Text(heading))
            out.print(_table(plan, rows, unit, out.width))
    for export in plan.exports:
        out.print()
        out.print(Text(f"for {export.tool} ({export.version})"))
        for note in export.notes:
            out.print(Text(f"  {note}"))
    out.print()
    for text in plan.assumptions:
        out.print(Text(f"assumed: {text}", style="dim"))
    out.print(Text(f"{plan.num_priced:,} layouts priced in {elapsed_seconds:.1f} s", style="dim"))


def write_export(plan: LayoutPlan) -> None:
    """Prints the file of the plan's export on stdout, where it can be piped into one, and on stderr what it is and what it cannot say."""
    export, best = plan.exports[0], plan.best
    assert best is not None
    unit = "tokens" if plan.tokens_per_example else "samples"
    sys.stderr.write(
        f"tightfit: {best.layout}, {format_bytes(best.worst.total_bytes)} a GPU, {plan.rate(best):,.0f} {unit}/s (predicted)\n"
    )
    sys.stderr.write("".join(f"tightfit: {note}\n" for note in export.notes))
    sys.stdout.write(export.text)


def cost_in_words(cost: LayoutCost, unit: str) -> str:
    """What was asked of the cost, as one line."""
    found = []
    if cost.price_per_hour is not None and cost.per_price is not None:
        found.append(f"{cost.price_per_hour:,.2f} per hour, {format_count(cost.per_price)} {unit} for each 1.00")
    if cost.total is not None and cost.total_seconds is not None:
        took = f"{format_count(cost.total)} {unit} in {format_long(cost.total_seconds)}"
        late = "" if cost.meets_deadline else f", after the deadline of {format_long(cost.deadline_seconds or 0.0)}"
        price = "" if cost.total_price is None else f", for {cost.total_price:,.0f}"
        found.append(f"{took}{late}{price}")
    return "; ".join(found)


def format_count(count: float) -> str:
    """A count with a letter: `300B`, `1.50T`, `41.2M`."""
    for factor, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= factor:
            return f"{count / factor:.3g}{letter}"
    return f"{count:.3g}"


def format_long(seconds: float) -> str:
    """A time of hours or days: `7.3 days`, `11.2 h`."""
    if seconds >= 2 * 86400:
        return f"{seconds / 86400:,.1f} days"
    return f"{seconds / 3600:,.1f} h" if seconds >= 3600 else format_seconds(seconds)


def _batches(layout: Layout) -> str:
    recompute = (
        f"{layout.recompute} recomputation of {layout.num_recomputed} blocks a rank"
        if layout.num_recomputed
        else "no recomputation"
    )
    stages = f" x {layout.stages_per_rank} stages" if layout.stages_per_rank > 1 else ""
    schedule = f", schedule {layout.schedule}{stages}" if layout.pp > 1 else ""
    return f"micro-batch {layout.micro_batch}, {layout.accumulation} of them per step, {recompute}{schedule}"


def _memory(found: PricedLayout) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="dim")
    table.add_column("")
    # All stages of a long pipeline are in the JSON; a person looks at the ends and at the worst.
    ranks = {r.rank: r for r in (found.ranks[0], found.worst, found.ranks[-1])}.values()
    for rank in ranks:
        table.add_column(rank.role, justify="right")
    for name in found.worst.by_class:
        if any(rank.by_class[name] for rank in ranks):
            table.add_row(Text(name.replace("_", " ")), *(Text(format_bytes(rank.by_class[name])) for rank in ranks))
    table.add_row(Text("total"), *(Text(format_bytes(rank.total_bytes)) for rank in ranks))
    return table


def _table(plan: LayoutPlan, rows: tuple[PricedLayout, ...], unit: str, width: int) -> Table:
    columns = [Column(heading="layout", wraps=True, least_width=12), Column(heading="micro-batch", is_number=True)]
    columns += [Column(heading=heading, is_number=True) for heading in ("peak", f"{unit}/s")]
    columns.append(Column(heading="mostly", wraps=True, least_width=16, yields=1))
    cells = [
        (
            str(found.layout),
            f"{found.layout.micro_batch} x {found.layout.accumulation}",
            format_bytes(found.worst.total_bytes),
            f"{plan.rate(found):,.0f}",
            _mostly(plan, found),
        )
        for found in rows
    ]
    return fitted(columns, cells, width)


def _mostly(plan: LayoutPlan, found: PricedLayout) -> str:
    """What makes a layout slower than the best one, or what of it does not fit."""
    if not found.fits:
        largest = sorted(found.worst.by_class.items(), key=lambda item: -item[1])[:2]
        return ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in largest)
    assert plan.best is not None
    mine, best = found.seconds.parts(), plan.best.seconds.parts()
    name = max(mine, key=lambda part: mine[part] - best[part])
    more = mine[name] - best[name]
    return (
        f"{name} +{format_seconds(more)}"
        if more > 0
        else "equally fast, on more GPUs or with more kinds of parallelism"
    )
