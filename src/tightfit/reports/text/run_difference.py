"""The difference of two runs as text: peaks and categories side by side, what changed where, and where the runs first diverge."""

from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from tightfit.diagnosis.difference import Asked, RunDifference, Side
from tightfit.reports.advice import LABELS
from tightfit.reports.text.estimates import MAX_WIDTH, console, fitted
from tightfit.reports.text.folders import without_common_folder
from tightfit.reports.text.table_columns import Column, shorten_middle, shorten_place
from tightfit.units import format_bytes, format_bytes_change

NUM_STEPS = 8
NUM_CALLERS = 3


class DifferenceText:
    """One difference, as wide as the console that prints it."""

    def __init__(self, difference: RunDifference) -> None:
        self._difference = difference

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        difference, width = self._difference, min(options.max_width, MAX_WIDTH)
        yield Group(_subject("A", difference.a), _subject("B", difference.b))
        for section in (
            _peaks(difference, width),
            *_changes(difference, width),
            *_steps(difference, width),
            *_divergences(difference, width),
        ):
            yield ""
            yield section


def write_difference(difference: RunDifference) -> None:
    """Prints one difference on stdout."""
    console().print(DifferenceText(difference))


def _subject(letter: str, side: Side) -> Text:
    how = "estimated on" if side.origin == "estimate" else "recorded on"
    return Text.assemble(f"{letter}  ", (side.label, "bold"), f", {how} {side.device}")


def _change(num_bytes: int) -> str:
    return format_bytes_change(num_bytes) or "same"


def _label(category: str) -> str:
    return LABELS.get(category, category.replace("_", " "))


def _lines_of(difference: RunDifference) -> list[Column]:
    """The columns for lines: one for runs of the same program, else one per run."""
    headings = ("line",) if difference.matched_by == "lines" else ("line in A", "line in B")
    return [
        Column(heading=heading, shorten=shorten_place, least_width=27, yields=at) for at, heading in enumerate(headings)
    ]


def _places(difference: RunDifference, ours: str, theirs: str) -> tuple[str, ...]:
    asked = [(divergence.a, divergence.b) for divergence in difference.divergences]
    ours_all = [*(change.a_where for change in difference.changes), *(a.where for a, _ in asked if a)]
    theirs_all = [*(change.b_where for change in difference.changes), *(b.where for _, b in asked if b)]
    # Each run by its own folder: the two were often recorded on different machines.
    shown = without_common_folder(ours_all)(ours), without_common_folder(theirs_all)(theirs)
    # A change that only one run has has a place in that one only.
    return (shown[0] or shown[1],) if difference.matched_by == "lines" else shown


def _peaks(difference: RunDifference, width: int) -> RenderableType:
    a, b = difference.a, difference.b
    figures = [
        ("peak allocated", a.peak_allocated_bytes, b.peak_allocated_bytes),
        ("peak reserved", a.peak_reserved_bytes, b.peak_reserved_bytes),
    ]
    names = sorted(a.at_peak | b.at_peak, key=lambda name: -max(a.at_peak.get(name, 0), b.at_peak.get(name, 0)))
    figures += [(f"  {_label(name)}", a.at_peak.get(name, 0), b.at_peak.get(name, 0)) for name in names]
    columns = (
        Column(heading="", shorten=shorten_middle, least_width=12),
        Column(heading="A", is_number=True),
        Column(heading="B", is_number=True),
        Column(heading="B - A", is_number=True),
    )
    rows = [(name, format_bytes(x), format_bytes(y), _change(y - x)) for name, x, y in figures]
    return fitted(columns, rows, width, title="at the peak")


def _changes(difference: RunDifference, width: int) -> Iterator[RenderableType]:
    title = "differences at the peak, by allocation site"
    if not difference.changes:
        yield Text.assemble((title, "bold"), ": none")
        return
    columns = [
        Column(heading="B - A", is_number=True),
        Column(heading="A", is_number=True),
        Column(heading="B", is_number=True),
        Column(heading=""),
        Column(heading="what"),
        *_lines_of(difference),
    ]
    rows = [
        (
            _change(change.more_bytes),
            format_bytes(change.a_bytes),
            format_bytes(change.b_bytes),
            change.kind,
            _label(change.category),
            *_places(difference, change.a_where, change.b_where),
        )
        for change in difference.changes
    ]
    yield fitted(columns, rows, width, title=title)
    if difference.matched_by == "order":
        yield Text("The runs share no lines: lines are matched by the sizes that they allocate, in order.", "dim")


def _steps(difference: RunDifference, width: int) -> Iterator[RenderableType]:
    if not difference.steps:
        return
    columns = [Column(heading=heading, shorten=shorten_middle, least_width=6) for heading in ("in A", "in B")]
    headings = ("peak in A", "peak in B", "end of A", "end of B", "allocations in A", "in B", "equal")
    columns += [Column(heading=heading, is_number=True) for heading in headings]
    rows = [
        (
            pair.a_step,
            pair.b_step,
            *map(format_bytes, (pair.a_peak_bytes, pair.b_peak_bytes, pair.a_end_bytes, pair.b_end_bytes)),
            *(f"{count:,}" for count in (pair.a_allocations, pair.b_allocations, pair.same_allocations)),
        )
        for pair in difference.steps[:NUM_STEPS]
    ]
    yield fitted(columns, rows, width, title="step by step")


def _divergences(difference: RunDifference, width: int) -> Iterator[RenderableType]:
    if not difference.divergences:
        yield Text(
            "All allocations of these steps are equal, in the same order."
            if difference.steps
            else "No steps to compare."
        )
        return
    first = difference.divergences[0]
    head = Text.assemble(
        ("first difference", "bold"), f": in {first.a_step} of A and {first.b_step} of B (allocations count from 0)"
    )
    yield Group(head, *_allocation("A", first.a), *_allocation("B", first.b))
    columns = (
        Column(heading="times", is_number=True),
        Column(heading="bytes in A", is_number=True),
        Column(heading="bytes in B", is_number=True),
        *_lines_of(difference),
    )
    rows = [
        (
            f"{divergence.count:,}",
            format_bytes(divergence.a_bytes),
            format_bytes(divergence.b_bytes),
            *_places(
                difference, divergence.a.where if divergence.a else "", divergence.b.where if divergence.b else ""
            ),
        )
        for divergence in difference.divergences
    ]
    yield fitted(columns, rows, width, title="allocations that differ")


def _allocation(letter: str, asked: Asked | None) -> Iterator[Text]:
    """The allocation of one side where the runs diverge, and its callers."""
    if asked is None:
        yield Text(f"{letter}  allocates nothing there")
        return
    callers = "".join(f" < {caller.rpartition('/')[2]}" for caller in asked.callers[:NUM_CALLERS])
    operator = asked.operator.removeprefix("aten.")
    yield Text(
        f"{letter}  allocation {asked.number:,}: {format_bytes(asked.num_bytes)} for {operator or 'an unknown operator'}, {asked.where.rpartition('/')[2]}{callers}"
    )
