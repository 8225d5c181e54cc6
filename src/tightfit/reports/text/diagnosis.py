"""A diagnosis as text: memory at the peak, allocation sites, growth, fragmentation, and suggestions, on one page."""

from collections.abc import Callable, Iterator, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from tightfit.diagnosis.diagnose import Diagnosis, Moment, RecordedOutOfMemory
from tightfit.reports.advice import LABELS
from tightfit.reports.text.estimates import MAX_WIDTH, category_table, console, fitted
from tightfit.reports.text.folders import without_common_folder
from tightfit.reports.text.table_columns import GAP, Column, shorten_middle, shorten_module, shorten_place
from tightfit.units import format_bytes, format_bytes_change, format_seconds, format_seconds_change

NUM_CALLERS = 2
NUM_SETTINGS = 4
NUM_STEPS = 8
_LABEL_CELLS = 16
_FREE = (
    ("whole_segments_bytes", "entirely free segments"),
    ("whole_pages_bytes", "entirely free pages"),
    ("pinned_bytes", "free parts of segments that are in use"),
    ("small_pool_bytes", "in the pool of small blocks (up to 1 MiB)"),
    ("other_streams_bytes", "in the pools of other streams"),
    ("waiting_bytes", "freed, but in use by another stream (record_stream)"),
)


class DiagnosisText:
    """One diagnosis, as wide as the console that prints it."""

    def __init__(self, diagnosis: Diagnosis) -> None:
        self._diagnosis = diagnosis

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        diagnosis, width = self._diagnosis, min(options.max_width, MAX_WIDTH)
        # From the facts to the advice: what is at the peak, what is wrong with it, what to do.
        sections = (
            Group(_subject(diagnosis), _figures(diagnosis)),
            category_table(diagnosis.at_peak, diagnosis.peak_allocated_bytes, width, is_ascii=options.ascii_only),
            *_allocation_sites(diagnosis, width),
            *_steps(diagnosis, width),
            *_growth(diagnosis, width),
            *_leaks(diagnosis),
            *_fragmentation(diagnosis, width),
            *_settings(diagnosis, width),
            *_remedies(diagnosis),
            *_small_print(diagnosis),
        )
        for number, section in enumerate(sections):
            if number:
                yield ""
            yield section


def write_diagnosis(diagnosis: Diagnosis) -> None:
    """Prints one diagnosis on stdout."""
    console().print(DiagnosisText(diagnosis))


def _subject(diagnosis: Diagnosis) -> Text:
    how = "estimated on" if diagnosis.origin == "estimate" else "recorded on"
    parts: list[str | tuple[str, str]] = [(diagnosis.label, "bold"), f", {how} ", (diagnosis.device, "bold")]
    if diagnosis.capacity_bytes is not None:
        parts.append(f", {format_bytes(diagnosis.capacity_bytes)}")
    return Text.assemble(*parts)


def _figures(diagnosis: Diagnosis) -> Table:
    table = Table.grid(padding=(0, GAP, 0, 0))
    table.add_column(no_wrap=True, min_width=_LABEL_CELLS)
    table.add_column(overflow="fold")
    if diagnosis.oom is not None:
        table.add_row(Text("out of memory", style="bold red"), _failure(diagnosis.oom))
    allocated, reserved = diagnosis.peak_allocated_bytes, diagnosis.peak_reserved_bytes
    table.add_row("peak allocated", f"{format_bytes(allocated)} {_when(diagnosis.moment)}")
    # A cache from before the recording can be larger than anything that the recording needs.
    more = "" if diagnosis.start_reserved_bytes <= reserved else f" (before the recording: {_start(diagnosis)})"
    table.add_row(
        "peak reserved",
        f"{format_bytes(reserved)}, {format_bytes(reserved - allocated)} above the peak allocated{more}",
    )
    if diagnosis.context_bytes is not None:
        context = diagnosis.context_bytes
        outside = "the CUDA context and NCCL" if diagnosis.communicator_bytes else "the CUDA context"
        said = f"{format_bytes(reserved + context)} with {outside} ({format_bytes(context)})"
        too_much = reserved + context - (diagnosis.capacity_bytes or reserved + context)
        verdict = (f", {format_bytes(too_much)} more than its capacity", "bold red") if too_much > 0 else ""
        table.add_row("peak GPU memory", Text.assemble(said, verdict))
    return table


def _failure(oom: RecordedOutOfMemory) -> str:
    at = f" at {oom.where}" if oom.where else ""
    free = "" if oom.gpu_free_bytes is None else f", {format_bytes(oom.gpu_free_bytes)} free on the GPU"
    first = "" if oom.num_failures == 1 else f" (the first of {oom.num_failures} such errors)"
    return (
        f"{format_bytes(oom.requested_bytes)} requested{at}, with {format_bytes(oom.allocated_bytes)} allocated and "
        f"{format_bytes(oom.reserved_bytes)} reserved{free}; largest free block {format_bytes(oom.largest_free_bytes)}{first}"
    )


def _start(diagnosis: Diagnosis) -> str:
    return format_bytes(diagnosis.start_reserved_bytes)


def _when(moment: Moment) -> str:
    """The step, the time since the start, and the allocation made then."""
    operator = moment.operator.removeprefix("aten.")
    # What no line asked for is named by its operator.
    line = "" if moment.where == moment.operator else _file_and_line(moment.where)
    where = " ".join(part for part in (line, operator) if part)
    parts = [
        f"in {moment.step}" if moment.step else "",
        f"{format_seconds(moment.seconds)} after the start" if moment.seconds else "",
        f"when {where} allocates {format_bytes(moment.asked_bytes)}" if where else "",
    ]
    return ", ".join(part for part in parts if part) or "at the start"


def _label(category: str) -> str:
    return LABELS.get(category, category.replace("_", " "))


def _file_and_line(place: str) -> str:
    return place.rpartition("/")[2]


def _shorten_end(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _from(callers: Sequence[str]) -> str:
    """The calling lines, nearest first, without their folders."""
    return " < ".join(_file_and_line(caller) for caller in callers[:NUM_CALLERS])


def _shown(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int, title: str) -> Table:
    """A table without empty columns."""
    # Recordings without C++ frames have no operators, and those of other programs no modules.
    used = [at for at in range(len(columns)) if any(row[at] for row in rows)]
    return fitted([columns[at] for at in used], [[row[at] for at in used] for row in rows], width, title=title)


def _place_column(heading: str = "your line") -> Column:
    return Column(heading=heading, shorten=shorten_place, least_width=20, yields=5)


def _stripped(diagnosis: Diagnosis) -> Callable[[str], str]:
    """A function that removes the folder that all places have in common."""
    named = (*diagnosis.allocation_sites, *diagnosis.growth, *diagnosis.pinned_by, *diagnosis.suggestions)
    return without_common_folder(one.where for one in named)


def _allocation_sites(diagnosis: Diagnosis, width: int) -> Iterator[RenderableType]:
    shown = _stripped(diagnosis)
    columns = (
        Column(heading="bytes", is_number=True),
        Column(heading="blocks", is_number=True),
        Column(heading="what"),
        _place_column(),
        Column(heading="operator", shorten=shorten_middle, least_width=12, yields=2),
        Column(heading="module", shorten=shorten_module, least_width=14, yields=3),
        Column(heading="called from", shorten=_shorten_end, least_width=14, yields=6),
    )
    rows = [
        (
            format_bytes(holder.num_bytes),
            str(holder.num_blocks),
            _label(holder.category),
            # Blocks from before the recording have no stack unless they outlive it.
            shown(holder.where) or "(before the recording)",
            holder.operator.removeprefix("aten."),
            holder.module,
            _from(holder.callers),
        )
        for holder in diagnosis.allocation_sites
    ]
    if rows:
        yield _shown(columns, rows, width, "top allocation sites")


def _steps(diagnosis: Diagnosis, width: int) -> Iterator[RenderableType]:
    steps = [step for step in diagnosis.steps if step.peak_reserved_bytes]
    if len(steps) < 2:
        return
    columns = [Column(heading="", shorten=shorten_middle, least_width=8)]
    columns += [
        Column(heading=h, is_number=True) for h in ("peak allocated", "peak reserved", "still allocated after the step")
    ]
    rows = [
        (step.name, *map(format_bytes, (step.peak_allocated_bytes, step.peak_reserved_bytes, step.end_allocated_bytes)))
        for step in steps[:NUM_STEPS]
    ]
    if len(steps) > NUM_STEPS:
        rows.append((f"and {len(steps) - NUM_STEPS} more", "", "", ""))
    yield fitted(columns, rows, width, title="step by step")


def _leaks(diagnosis: Diagnosis) -> Iterator[RenderableType]:
    """Who holds what grows."""
    shown = _stripped(diagnosis)
    for leak in diagnosis.leaks:
        yield Text.assemble((leak.cause, "bold"), leak.explain(shown).removeprefix(leak.cause))


def _growth(diagnosis: Diagnosis, width: int) -> Iterator[RenderableType]:
    shown = _stripped(diagnosis)
    title = "growth from step to step"
    if not diagnosis.growth:
        yield Text.assemble((title, "bold"), f": {diagnosis.growth_note or 'none'}")
        return
    columns = (
        Column(heading="per step", is_number=True),
        Column(heading="at the end", is_number=True),
        Column(heading="blocks", is_number=True),
        Column(heading="what"),
        _place_column(),
        Column(heading="operator", shorten=shorten_middle, least_width=12, yields=2),
        Column(heading="called from", shorten=_shorten_end, least_width=14, yields=6),
    )
    rows = [
        (
            f"+{format_bytes(one.bytes_per_step)}",
            format_bytes(one.num_bytes),
            str(one.num_blocks),
            _label(one.category),
            shown(one.where) or "(no stack)",
            one.operator.removeprefix("aten."),
            _from(one.callers),
        )
        for one in diagnosis.growth
    ]
    yield _shown(columns, rows, width, title)


def _fragmentation(diagnosis: Diagnosis, width: int) -> Iterator[RenderableType]:
    shown = _stripped(diagnosis)
    found = diagnosis.fragmentation
    what = "at the error" if diagnosis.oom is not None else "at the reserved peak"
    head = Text.assemble(
        ("reserved but unused", "bold"),
        f": {format_bytes(found.free_bytes)} {what}, {_when(diagnosis.fragmented_at)}",
    )
    table = Table.grid(padding=(0, GAP, 0, 0))
    table.add_column(justify="right", no_wrap=True, min_width=10)
    table.add_column()
    for name, words in _FREE:
        num_bytes = getattr(found, name)
        if num_bytes:
            table.add_row(format_bytes(num_bytes), words)
    returned = format_bytes(found.returnable_bytes) if found.returnable_bytes else "nothing"
    rounding = format_bytes(found.rounding_bytes)
    said = f"torch.cuda.empty_cache() would free {returned}. Rounding makes the blocks in use {rounding} larger than requested."
    yield Group(head, table, said)
    if diagnosis.pinned_by:
        columns = (
            Column(heading="pinned", is_number=True),
            Column(heading="in use", is_number=True),
            Column(heading="blocks", is_number=True),
            Column(heading="what"),
            _place_column(),
        )
        rows = [
            (
                format_bytes(pin.pinned_bytes),
                format_bytes(pin.live_bytes),
                str(pin.num_blocks),
                _label(pin.category),
                shown(pin.where) or "(before the recording)",
            )
            for pin in diagnosis.pinned_by
        ]
        yield _shown(columns, rows, width, "allocations that pin segments")


def _settings(diagnosis: Diagnosis, width: int) -> Iterator[RenderableType]:
    title = "allocator settings"
    tried = diagnosis.settings_tried
    advised = [one for one in tried if one.is_advised]
    shown = [*advised, *(one for one in tried if not one.is_advised)][:NUM_SETTINGS]
    if not shown:
        yield Text.assemble((title, "bold"), ": none of those tried reserves less")
        return
    columns = (
        Column(heading="memory", is_number=True),
        Column(heading="peak reserved", is_number=True),
        Column(heading="settings", least_width=30, yields=2, wraps=True),
        Column(heading="", least_width=16, yields=1, wraps=True),
    )
    rows = [
        (
            format_bytes_change(-one.saves_bytes),
            format_bytes(one.peak_reserved_bytes),
            one.settings,
            "; ".join(part for part in ("recommended" if one.is_advised else "", one.note) if part),
        )
        for one in shown
    ]
    yield _shown(columns, rows, width, title)


def _remedies(diagnosis: Diagnosis) -> Iterator[RenderableType]:
    suggestions, shown = diagnosis.suggestions, _stripped(diagnosis)
    if not suggestions:
        return
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0))
    table.title, table.title_justify, table.title_style = "suggestions, cheapest first", "left", "bold"
    table.header_style = "dim"
    table.add_column("memory", justify="right", no_wrap=True)
    table.add_column("time per step", justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for suggestion in suggestions:
        # A free one has a cost too, 0: an empty cell would leave it open.
        cost = "unknown" if suggestion.adds_seconds is None else format_seconds_change(suggestion.adds_seconds) or "±0"
        where = f" [{shown(suggestion.where)}]" if suggestion.where else ""
        lossy = "" if suggestion.is_exact else "; changes results"
        table.add_row(
            format_bytes_change(-suggestion.saves_bytes),
            cost,
            Text.assemble(
                f"{suggestion.what}{where}", (f" ({suggestion.note}{lossy})" if suggestion.note else lossy, "dim")
            ),
        )
    yield table
    times = " Times are estimates." if any(suggestion.adds_seconds for suggestion in suggestions) else ""
    yield Text(f"Each row alone lowers the peak of the whole run by that much; rows do not add up.{times}", style="dim")


def _small_print(diagnosis: Diagnosis) -> Iterator[RenderableType]:
    said = dict.fromkeys(assumption.what for assumption in diagnosis.assumptions)
    if said:
        yield Group(Text("assumptions", style="bold"), *(Text(f"- {what}") for what in said))
