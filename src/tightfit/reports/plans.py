"""Plans as the library returns them, and as text: the verdict, the techniques with their savings, and the alternatives."""

import dataclasses
import io
from collections.abc import Iterator
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from tightfit.planner import plan as plain
from tightfit.planner.explain import groups, reached_limit, sentences, verdict
from tightfit.reports.printer import Printer
from tightfit.reports.text.estimates import MAX_WIDTH, TIMES_ARE_ESTIMATED, console, fitted
from tightfit.reports.text.table_columns import Column, shorten_module
from tightfit.units import format_bytes, format_bytes_change, format_seconds, format_seconds_change

_NOTEBOOK_WIDTH = 120
_HTML = '<pre style="white-space:pre;overflow-x:auto;line-height:normal;font-family:monospace">{code}</pre>'
_NUM_ASSUMPTIONS = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan(plain.Plan):
    """The fastest combination of techniques that fits; shown in full by rich and in a notebook."""

    def explain(self) -> str:
        """Why this plan, in a few sentences."""
        return "\n".join([*sentences(self), *self.advice])

    def __rich__(self) -> "PlanText":
        return PlanText(self)

    def _repr_html_(self) -> str:
        # rich has its own HTML for notebooks only for what it prints itself, so the text is exported here.
        page = Console(record=True, file=io.StringIO(), width=_NOTEBOOK_WIDTH, highlight=False)
        page.print(PlanText(self))
        return page.export_html(inline_styles=True, code_format=_HTML)

    def _repr_pretty_(self, printer: Printer, cycle: bool) -> None:
        """What IPython shows in a terminal; all fields are in `repr`."""
        printer.text(self.explain())


class PlanText:
    """One plan in full, as wide as the console that prints it."""

    def __init__(self, plan: plain.Plan, *, elapsed_seconds: float | None = None) -> None:
        self._plan = plan
        self._elapsed_seconds = elapsed_seconds

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        plan, width = self._plan, min(options.max_width, MAX_WIDTH)
        # Only the verdict itself is coloured.
        word, _, rest = verdict(plan).partition(":")
        yield Text.assemble((word, "bold" if plan.is_changed else "bold green" if plan.fits else "bold red"), ":", rest)
        yield Text(plan.target, style="bold")
        yield ""
        yield _runs(plan, width)
        if plan.choices:
            yield ""
            yield _choices(plan, width)
        if plan.alternatives and (plan.choices or not plan.fits):
            yield ""
            yield _alternatives(plan, width)
        for heading, lines in (
            ("why", _why(plan)),
            ("other suggestions", plan.advice),
            ("assumptions", _assumptions(plan)),
        ):
            if lines := list(lines):
                yield ""
                yield Text(heading, style="bold")
                for line in lines:
                    yield Text(f"- {line}")
        if self._elapsed_seconds is not None:
            yield ""
            yield Text(f"{TIMES_ARE_ESTIMATED}; planned in {self._elapsed_seconds:.1f} s", style="dim")


def write_plan(plan: plain.Plan, *, elapsed_seconds: float) -> None:
    """Prints a plan in full on stdout."""
    console().print(PlanText(plan, elapsed_seconds=elapsed_seconds))


def _why(plan: plain.Plan) -> Iterator[str]:
    if not (plan.fits or plan.is_changed) and (limit := reached_limit(plan)):
        yield limit
    # The first two sentences repeat the verdict and the table of runs above.
    yield from list(sentences(plan))[2:]


def _runs(plan: plain.Plan, width: int) -> Table:
    headings = ("peak GPU memory", "upper bound", "allocated", "time per step")
    columns = [Column(heading=""), *(Column(heading=heading, is_number=True) for heading in headings)]
    rows = []
    for name, run in [("plain", plan.baseline), *([("planned", plan.run)] if plan.has_planned_run else [])]:
        sizes = (run.peak.device_bytes, run.peak.device_high_bytes, run.peak.allocated_bytes)
        rows.append((name, *map(format_bytes, sizes), format_seconds(run.seconds_per_step)))
    return fitted(columns, rows, width)


def _choices(plan: plain.Plan, width: int) -> Table:
    columns = [
        Column(heading="technique"),
        Column(heading="where", shorten=shorten_module, least_width=16, yields=1),
        Column(heading="memory", is_number=True),
        Column(heading="time", is_number=True),
        Column(heading="exact"),
        Column(heading="settings", least_width=24, yields=2, wraps=True),
    ]
    rows = [
        (
            group.technique,
            group.where,
            format_bytes_change(-group.saves_bytes),
            format_seconds_change(group.adds_seconds),
            "yes" if group.exact else "no",
            group.settings,
        )
        for group in groups(plan.choices)
    ]
    return fitted(columns, rows, width, title="techniques applied")


def _alternatives(plan: plain.Plan, width: int) -> Table:
    columns = [
        Column(heading="", least_width=24, yields=1, wraps=True),
        Column(heading="peak GPU memory", is_number=True),
        Column(heading="time per step", is_number=True),
        Column(heading="", least_width=24, yields=2, wraps=True),
    ]
    rows = [
        (
            a.name,
            "" if a.device_bytes is None else format_bytes(a.device_bytes),
            "" if a.seconds_per_step is None else format_seconds(a.seconds_per_step),
            a.why,
        )
        for a in plan.alternatives
    ]
    return fitted(columns, rows, width, title="alternatives")


def _assumptions(plan: plain.Plan) -> Iterator[Any]:
    seen = dict.fromkeys(a.what for a in plan.assumptions)
    yield from list(seen)[:_NUM_ASSUMPTIONS]
    if len(seen) > _NUM_ASSUMPTIONS:
        yield f"and {len(seen) - _NUM_ASSUMPTIONS} more (--json lists all)"
