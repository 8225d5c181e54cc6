"""Plans over several numbers of cards as text: a row for each, and how many are enough."""

from rich.table import Table
from rich.text import Text

from tightfit.layouts.answers.layout_curve import LayoutCurve
from tightfit.layouts.answers.layout_plan import LayoutPlan, PricedLayout
from tightfit.reports.text.estimates import console, fitted
from tightfit.reports.text.layouts import format_count, format_long
from tightfit.reports.text.table_columns import Column
from tightfit.units import format_bytes, format_seconds


def write_curve(curve: LayoutCurve, *, elapsed_seconds: float) -> None:
    """Prints the curve on stdout."""
    out, first = console(), curve.points[0]
    unit = "tokens" if first.tokens_per_example else "samples"
    out.print(Text(_verdict(curve), style="bold"))
    out.print(Text(f"{first.device} ({first.node}), global batch {first.examples}"))
    out.print()
    out.print(_table(curve, unit, out.width))
    if curve.cheapest is not None:
        out.print()
        out.print(Text(f"cheapest per {unit[:-1]}: {curve.cheapest.num_gpus} GPUs"))
    out.print()
    for text in (curve.fewest or first).assumptions:
        out.print(Text(f"assumed: {text}", style="dim"))
    priced = sum(point.num_priced for point in curve.points)
    out.print(Text(f"{priced:,} layouts priced in {elapsed_seconds:.1f} s", style="dim"))


def _verdict(curve: LayoutCurve) -> str:
    first, fewest, in_time = curve.points[0], curve.fewest, curve.fewest_in_time
    if fewest is None:
        return f"no layout fits up to {curve.points[-1].num_gpus} x {first.device}, {format_bytes(first.budget_bytes)} each"
    has_deadline = any(point.cost is not None and point.cost.deadline_seconds is not None for point in curve.fitting)
    fits = f"fits from {fewest.num_gpus} {'GPU' if fewest.num_gpus == 1 else 'GPUs'} on"
    if not has_deadline:
        return fits
    if in_time is None:
        return f"{fits}; with up to {curve.points[-1].num_gpus} not done before the deadline"
    return f"{fits}; done before the deadline from {in_time.num_gpus} on"


def _table(curve: LayoutCurve, unit: str, width: int) -> Table:
    costs = [point.cost for point in curve.fitting if point.cost is not None]
    has_price = any(cost.price_per_hour is not None for cost in costs)
    has_total = any(cost.total is not None for cost in costs)
    headings = ["peak", "step", f"{unit}/s", "of linear"]
    headings += ["per hour", f"{unit} for 1.00"] if has_price else []
    headings += ["whole training"] if has_total else []
    headings += ["its cost"] if has_price and has_total else []
    columns = [Column(heading="GPUs", is_number=True), Column(heading="layout", wraps=True, least_width=14)]
    columns += [Column(heading=heading, is_number=True) for heading in headings]
    rows = []
    for point in curve.points:
        row = _figures(curve, point, point.best) if point.best is not None else [_why_not(point), "", "", ""]
        row += _costs(point, has_price=has_price, has_total=has_total)
        layout = "does not fit" if point.best is None else _layout(point, point.best)
        rows.append((str(point.num_gpus), layout, *row))
    return fitted(columns, rows, width)


def _layout(point: LayoutPlan, best: PricedLayout) -> str:
    used = best.layout.num_gpus
    return str(best.layout) if used == point.num_gpus else f"{best.layout} (on {used})"


def _figures(curve: LayoutCurve, point: LayoutPlan, best: PricedLayout) -> list[str]:
    fewest = curve.fewest
    assert fewest is not None
    assert fewest.best is not None
    # Of cards that the first layout uses: those that it leaves idle are not linear either.
    linear = point.rate(best) / point.num_gpus / (fewest.rate(fewest.best) / fewest.best.layout.num_gpus)
    figures = [format_bytes(best.worst.total_bytes), format_seconds(best.seconds.total), f"{point.rate(best):,.0f}"]
    return [*figures, f"{linear:.0%}"]


def _why_not(point: LayoutPlan) -> str:
    least = min((found.worst.total_bytes for found in point.refused), default=0)
    return format_bytes(least) if least else ""


def _costs(point: LayoutPlan, *, has_price: bool, has_total: bool) -> list[str]:
    cost, cells = point.cost, []
    if has_price:
        cells += (
            ["", ""]
            if cost is None or cost.per_price is None
            else [f"{cost.price_per_hour:,.2f}", format_count(cost.per_price)]
        )
    if has_total:
        late = "" if cost is None or cost.meets_deadline else " (late)"
        cells.append("" if cost is None or cost.total_seconds is None else format_long(cost.total_seconds) + late)
    if has_price and has_total:
        cells.append("" if cost is None or cost.total_price is None else f"{cost.total_price:,.0f}")
    return cells
