"""What a model needs to be served, as text: whether the engine starts, the parts of the card's memory, and the room for requests."""

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from tightfit.reports.text.estimates import console
from tightfit.reports.text.table_columns import GAP
from tightfit.serving.costs.seconds_range import SecondsRange
from tightfit.serving.load.simulation import SHARE_WITHIN
from tightfit.serving.serving_estimate import ServingEstimate
from tightfit.units import format_bytes, format_range_of_seconds, format_seconds

IN_PART = "fits in part"


def write_serving(found: ServingEstimate, *, price_per_hour: float | None = None, elapsed_seconds: float) -> None:
    """Prints the estimate on stdout."""
    out = console()
    out.print(serving_verdict(found))
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
    for row in (*memory_rows(found), *speed_rows(found, price_per_hour), *load_rows(found)):
        table.add_row(*row)
    out.print(table)
    out.print()
    if found.change:
        out.print(Text(f"smallest change: {found.change}"))
    for text in found.assumptions:
        out.print(Text(f"assumed: {text}", style="dim"))
    out.print(Text(f"estimated in {elapsed_seconds:.1f} s", style="dim"))


def serving_verdict(found: ServingEstimate) -> Text:
    """Whether it starts, and the room that it has, or why it does not."""
    if not found.fits:
        words = "does not start" if found.takes_a_share else "does not fit"
        return Text.assemble((words, "bold red"), f": {found.why}")
    if found.layers_on_card is not None and found.num_layers is not None:
        whole = found.layers_on_card == found.num_layers
        words = ("fits", "bold green") if whole else (IN_PART, "bold yellow")
        return Text.assemble(words, f": {found.layers_on_card} of {found.num_layers} layers on the GPU")
    if not found.takes_a_share:
        return Text.assemble(
            ("fits", "bold green"), f": room for {int(found.max_concurrency):,} requests of the longest length at once"
        )
    number = found.max_concurrency if found.concurrency_at_lengths is None else found.concurrency_at_lengths
    lengths = (
        f"{found.settings.max_model_len:,} tokens" if found.concurrency_at_lengths is None else "the lengths asked for"
    )
    # Requests in a batch are limited too.
    together = min(int(number), found.settings.max_num_seqs)
    return Text.assemble(("starts", "bold green"), f": room for {together:,} requests of {lengths} at once")


def memory_rows(found: ServingEstimate) -> Iterator[tuple[str, str, str]]:
    """Name, figure and words of each row about the memory."""
    settings = found.settings
    each = " on each GPU" if settings.num_gpus > 1 else ""
    drafts = f"{format_bytes(found.draft_bytes)} of them of the draft" if found.draft_bytes else ""
    yield "weights", format_bytes(found.weights_bytes), ", ".join(part for part in (each.strip(), drafts) if part)
    adapters = settings.adapters
    if adapters is not None:
        yield "adapters", format_bytes(found.adapter_bytes), f"{adapters.number} at once, of rank {adapters.rank}"
    yield (
        "activations",
        format_bytes(found.activation_bytes),
        f"of the largest batch, {settings.max_num_batched_tokens:,} tokens"
        if found.takes_a_share
        else "beside the cache at the peak",
    )
    if found.graph_bytes:
        yield "CUDA graphs", format_bytes(found.graph_bytes), ""
    yield "CUDA context", format_bytes(found.context_bytes), ""
    if not found.takes_a_share:
        yield from _batch_rows(found)
        return
    whole = "the GPU" if found.engine == "vllm" else "what is free before the weights"
    share = f"what is left of {settings.gpu_memory_utilization:g} of {whole}"
    yield "cache", format_bytes(found.kv_bytes), f"{share}: {found.kv_tokens:,} tokens"
    yield "one more token", format_bytes(found.kv_bytes_per_token), "of cache" + each
    yield "one request", format_bytes(found.request_bytes), "of cache" + each
    kept = found.host_cache
    if kept is not None:
        words = f"pinned, in powers of two, for a cache of {format_bytes(kept.asked_bytes)}: {kept.num_tokens:,} tokens"
        yield "host memory", format_bytes(kept.pinned_bytes), words
    if found.sleep is not None:
        asleep = found.sleep
        words = f"{format_bytes(asleep.host_bytes)} on the host (pinned: up to twice that), awake again in {format_seconds(asleep.wake_seconds)}"
        yield "asleep", format_bytes(asleep.gpu_bytes), words


def _batch_rows(found: ServingEstimate) -> Iterator[tuple[str, str, str]]:
    """The cache of engines that hold that of a batch, and what is at the host."""
    number = found.settings.max_num_seqs
    requests = "one request" if number == 1 else f"{number:,} requests"
    kind = f", {found.cache}" if found.cache else ""
    yield "cache", format_bytes(found.kv_bytes), f"of {requests} of {found.settings.max_model_len:,} tokens{kind}"
    yield "one more token", format_bytes(found.kv_bytes_per_token), "of cache"
    if found.layers_on_card is not None and found.num_layers is not None:
        yield "layers", f"{found.layers_on_card} of {found.num_layers}", "on the GPU, the output among them"
    if found.host_bytes:
        yield "host memory", format_bytes(found.host_bytes), ""


def speed_rows(found: ServingEstimate, price_per_hour: float | None) -> Iterator[tuple[str, str, str]]:
    """Name, figure and words of each row about the speed."""
    speed = found.speed
    if speed is None:
        return
    yield "", "", ""
    yield (
        "first token",
        _range(speed.first_token),
        f"for a prompt of {speed.prompt_tokens:,} tokens, without waiting for other requests",
    )
    requests = f"{speed.num_requests:,} requests at once" if speed.num_requests > 1 else "one request"
    yield "each token", _range(speed.each_token), f"with {requests}"
    slow, fast = speed.tokens_per_second
    yield "throughput", f"{slow:,.0f}-{fast:,.0f}", "output tokens per second, with requests always waiting"
    cost = None if price_per_hour is None else found.cost_of_a_million(price_per_hour)
    if cost is not None:
        yield "cost", f"{cost[0]:.2f}-{cost[1]:.2f}", "per million output tokens"


def load_rows(found: ServingEstimate) -> Iterator[tuple[str, str, str]]:
    """Name, figure and words of each row about what was simulated under the load asked for."""
    load = found.load
    if load is None:
        return
    yield "", "", ""
    refused = f", {load.num_refused:,} refused as too long" if load.num_refused else ""
    cut = f", {load.num_cut:,} answers cut" if load.num_cut else ""
    yield "load", f"{load.rate:.3g}/s", f"{load.num_requests:,} requests in {load.seconds:,.0f} s{refused}{cut}"
    for name, times in (("first token", load.first_token), ("each token", load.each_token), ("whole", load.whole)):
        others = f"for half of the requests; for 90 % {format_seconds(times.p90)}, for 99 % {format_seconds(times.p99)}"
        yield name, format_seconds(times.p50), others
    yield "at once", f"{load.mean_requests:.1f}", f"requests on average, {load.most_requests:,} at most"
    yield "cache", f"{load.most_cache:.0%}", "of it in use at most"
    yield "preempted", f"{load.num_preempted:,}", f"requests, {load.num_preemptions:,} times"
    yield "throughput", f"{load.answer_tokens_per_second:,.0f}", "output tokens per second"
    if load.share_within is not None and load.goodput is not None:
        yield "within limits", f"{load.share_within:.1%}", f"of the requests: {load.goodput:.3g} per second"
    if load.largest_rate is not None:
        yield (
            "largest rate",
            f"{load.largest_rate:.3g}/s" if load.largest_rate else "none",
            f"of such requests, with {SHARE_WITHIN:.0%} within the limits however long the load lasts"
            if load.largest_rate
            else f"found: fewer than {SHARE_WITHIN:.0%} are within the limits even one at a time",
        )


def _range(seconds: SecondsRange) -> str:
    unit = format_seconds(seconds.high).rpartition(" ")[2]
    return f"{format_range_of_seconds(seconds.high, seconds.low, seconds.high)} {unit}"
