"""Which server is best, as text: the choices with what is published of their loss, what it does, the next ones, and why others do not serve."""

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from tightfit.reports.text.estimates import console
from tightfit.reports.text.table_columns import GAP
from tightfit.serving.choices.choosing import Offer
from tightfit.serving.choices.serving_plan import ServingPlan
from tightfit.serving.launch.launch_arguments import shell_line
from tightfit.units import format_bytes, format_seconds


def write_serving_plan(found: ServingPlan, *, elapsed_seconds: float) -> None:
    """Prints the plan on stdout."""
    out = console()
    if not found.offers:
        out.print(Text.assemble(("no server does", "bold red"), f": {found.model}"))
    else:
        best = found.offers[0]
        out.print(Text.assemble(("best", "bold green"), f" by {found.objective}: {best.kind.name}"))
        out.print()
        out.print(_table(_choices(found)))
        out.print()
        out.print(_table(_figures(best)))
        out.print()
        if len(found.offers) > 1:
            out.print(_alternatives(found))
            out.print()
        for arguments in found.launch.values():
            out.print(Text(shell_line(arguments)), soft_wrap=True)
        out.print()
    if found.refused:
        out.print(Text("does not serve", style="bold"))
        out.print(_table((name, "", why) for name, why in found.refused))
        out.print()
    for text in found.assumptions:
        out.print(Text(f"left out: {text}", style="dim"))
    out.print(Text(f"planned in {elapsed_seconds:.1f} s", style="dim"))


def _table(rows: Iterator[tuple[str, str, str]]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, GAP, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold", style="dim")
    for row in rows:
        table.add_row(*row)
    return table


def _choices(found: ServingPlan) -> Iterator[tuple[str, str, str]]:
    for choice in found.choices():
        loss = "" if choice.exact else f"changes answers; {choice.loss or 'no figure is published'}"
        yield choice.choice.replace("_", " "), choice.value, loss


def _figures(best: Offer) -> Iterator[tuple[str, str, str]]:
    estimate, speed = best.estimate, best.speed
    each = " on each GPU" if best.kind.degree > 1 else ""
    yield "weights", format_bytes(estimate.weights_bytes), each.strip()
    yield "cache", format_bytes(estimate.kv_bytes), f"{each.strip()}{': ' if each else ''}{estimate.kv_tokens:,} tokens"
    yield "first token", format_seconds(speed.first_token.middle), f"for a prompt of {speed.prompt_tokens:,} tokens"
    yield "each token", format_seconds(speed.each_token.middle), f"with {speed.num_requests:,} requests at once"
    yield "alone", format_seconds(best.seconds_alone), f"a whole request with {speed.answer_tokens:,} output tokens"
    servers = f" of {best.kind.replicas} such servers" if best.kind.replicas > 1 else ""
    yield "throughput", f"{best.tokens_per_second:,.0f}", f"output tokens per second{servers}"
    if best.cost_of_a_million is not None:
        yield "cost", f"{best.cost_of_a_million:.2f}", "per million output tokens"
    if best.load is not None:
        refused = f"; {best.load.num_refused:,} are refused as too long" if best.load.num_refused else ""
        yield (
            "under load",
            format_seconds(best.load.first_token.p99),
            f"to the first token and {format_seconds(best.load.each_token.p99)} for each further one, for 99 % of the requests{refused}",
        )


def _alternatives(found: ServingPlan) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, GAP, 0, 0))
    table.add_column("next best")
    for heading in ("tokens/s", "each token", "alone", "share", "cost"):
        table.add_column(heading, justify="right", no_wrap=True)
    for offer in found.offers[1:]:
        cost = "" if offer.cost_of_a_million is None else f"{offer.cost_of_a_million:.2f}"
        table.add_row(
            offer.kind.name,
            f"{offer.tokens_per_second:,.0f}",
            format_seconds(offer.speed.each_token.middle),
            format_seconds(offer.seconds_alone),
            f"{offer.server.settings.gpu_memory_utilization:g}",
            cost,
        )
    return table
