"""Several servers on one card, as text."""

from rich.table import Table
from rich.text import Text

from tightfit.reports.text.estimates import console
from tightfit.reports.text.table_columns import GAP
from tightfit.serving.choices.shared_card import SharedCard
from tightfit.units import format_bytes, format_seconds


def write_shared_card(found: SharedCard, *, elapsed_seconds: float) -> None:
    """Prints the answer on stdout."""
    out = console()
    out.print(_verdict(found))
    out.print(Text(f"{found.device}, {format_bytes(found.capacity_bytes)}"))
    out.print()
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, GAP, 0, 0))
    table.add_column("model", overflow="fold")
    for heading in ("share", "awake", "asleep", "on the host", "wakes in"):
        table.add_column(heading, justify="right", no_wrap=True)
    for server in found.servers:
        if server.estimate is None:
            table.add_row(f"{server.model}: {server.why}", "", "", "", "", "")
            continue
        table.add_row(
            server.model,
            f"{server.estimate.settings.gpu_memory_utilization:g}",
            format_bytes(server.awake_bytes),
            format_bytes(server.sleep.gpu_bytes),
            format_bytes(server.sleep.host_bytes),
            format_seconds(server.sleep.wake_seconds),
        )
    out.print(table)
    out.print()
    if found.is_known:
        out.print(
            Text(
                f"all awake {format_bytes(found.together_bytes)}; one awake, the others asleep {format_bytes(found.in_turns_bytes)} at most"
            )
        )
        out.print()
    out.print(Text(f"estimated in {elapsed_seconds:.1f} s", style="dim"))


def _verdict(found: SharedCard) -> Text:
    if found.fits_together:
        return Text.assemble(("fit together", "bold green"), ": all of them awake")
    if found.fits:
        words = f": one awake while the others sleep, {format_bytes(found.host_bytes)} of weights on the host (pinned: up to twice that)"
        return Text.assemble(("fit in turns", "bold yellow"), words)
    missing = found.in_turns_bytes - found.capacity_bytes
    words = (
        f": {format_bytes(missing)} are missing even in turns"
        if found.is_known
        else ": one of them does not fit even alone"
    )
    return Text.assemble(("do not fit", "bold red"), words)
