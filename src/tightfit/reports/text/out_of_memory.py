"""An out-of-memory error as text: what was missing, who held the memory, and what follows."""

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tightfit.diagnosis.out_of_memory_error import OutOfMemoryText
from tightfit.reports.text.estimates import console
from tightfit.reports.text.table_columns import GAP
from tightfit.units import format_bytes


def write_error(found: OutOfMemoryText) -> None:
    """Prints it on stdout."""
    out = console()
    too_little = f": {format_bytes(found.missing_bytes)} too little" if found.missing_bytes > 0 else ""
    asked, free = format_bytes(found.requested_bytes), format_bytes(found.free_bytes)
    out.print(
        Text.assemble(
            ("out of memory", "bold red"),
            f": one allocation asked for {asked}, and {free} of {format_bytes(found.capacity_bytes)} were free{too_little}",
        )
    )
    out.print()
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, GAP, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim")
    for name, num_bytes, note in (
        ("live tensors", found.allocated_bytes, "allocated by torch"),
        ("unused cache", found.unused_bytes, "reserved by torch's allocator"),
        ("CUDA context", found.outside_bytes, "and libraries, beside torch's allocator"),
        ("other processes", found.others_bytes, ""),
        ("free", found.free_bytes, ""),
    ):
        if num_bytes is not None:
            table.add_row(name, format_bytes(num_bytes), note)
    out.print(table)
    out.print()
    for sentence in found.why():
        out.print(Padding(Text(f"- {sentence}"), 0))
