"""What a model needs to be served, as text: whether the engine starts, the parts of the card's memory, and the room for requests."""

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from tightfit.reports.text.estimates import console
from tightfit.reports.text.table_columns import GAP
from tightfit.serving.serving_estimate import ServingEstimate
from tightfit.units import format_bytes


def write_serving(found: ServingEstimate, *, elapsed_seconds: float) -> None:
    """Prints the estimate on stdout."""
    out = console()
    out.print(_verdict(found))
    count = f"{found.settings.num_gpus} x " if found.settings.num_gpus > 1 else ""
    out.print(
        Text(
            f"{found.model} on {count}{found.device}, {format_bytes(found.capacity_bytes)}; {found.engine} {found.engine_version}"
        )
    )
    out.print()
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, GAP, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold", style="dim")
    for row in _rows(found):
        table.add_row(*row)
    out.print(table)
    out.print()
    for text in found.assumptions:
        out.print(Text(f"assumed: {text}", style="dim"))
    out.print(Text(f"estimated in {elapsed_seconds:.1f} s", style="dim"))


def _verdict(found: ServingEstimate) -> Text:
    if not found.fits:
        return Text.assemble(("does not start", "bold red"), f": {found.why}")
    number = found.max_concurrency if found.concurrency_at_lengths is None else found.concurrency_at_lengths
    lengths = (
        f"{found.settings.max_model_len:,} tokens" if found.concurrency_at_lengths is None else "the lengths asked for"
    )
    # Requests in a batch are limited too.
    together = min(int(number), found.settings.max_num_seqs)
    return Text.assemble(("starts", "bold green"), f": room for {together:,} requests of {lengths} at once")


def _rows(found: ServingEstimate) -> Iterator[tuple[str, str, str]]:
    settings = found.settings
    each = " on each GPU" if settings.num_gpus > 1 else ""
    yield "weights", format_bytes(found.weights_bytes), each.strip()
    yield (
        "activations",
        format_bytes(found.activation_bytes),
        f"of the largest batch, {settings.max_num_batched_tokens:,} tokens",
    )
    yield "CUDA context", format_bytes(found.context_bytes), ""
    share = f"what is left of {settings.gpu_memory_utilization:g} of the GPU"
    yield "cache", format_bytes(found.kv_bytes), f"{share}: {found.kv_tokens:,} tokens"
    yield "one more token", format_bytes(found.kv_bytes_per_token), "of cache" + each
    yield "one request", format_bytes(found.request_bytes), "of cache" + each
