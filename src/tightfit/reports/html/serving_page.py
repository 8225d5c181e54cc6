"""The estimate of a server as one HTML page that needs nothing else and runs no script: the memory as a stacked bar, the room for requests against their length, the times against the load."""

import dataclasses
import os
from collections.abc import Iterator

from tightfit.reports.html.assets import content_policy, styles
from tightfit.reports.html.line_chart import LineChart, line_chart
from tightfit.reports.html.templates import render
from tightfit.reports.text.serving_estimates import IN_PART, load_rows, memory_rows, serving_verdict, speed_rows
from tightfit.serving.launch.launch_arguments import shell_line
from tightfit.serving.serving_estimate import ServingEstimate
from tightfit.units import format_bytes, format_seconds

_STACK_WIDTH = 1000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of the bar: its class, name, bytes, words, share of the card, and place in the picture."""

    kind: str
    name: str
    num_bytes: int
    words: str
    share: str
    x: float
    width: float


def serving_page(found: ServingEstimate, *, price_per_hour: float | None = None) -> str:
    """The whole page."""
    page_styles = styles("page.css", "plan.css", "serving.css")
    word, _, details = serving_verdict(found).plain.partition(":")
    parts, end = _parts(found)
    in_bar = {part.name for part in parts} | {"CUDA context"}
    count = f"{found.settings.num_gpus} x " if found.settings.num_gpus > 1 else ""
    return render(
        "serving.html",
        title=f"{os.path.basename(found.model)}: served on {found.device}",
        policy=content_policy(styles=page_styles),
        styles=page_styles,
        found=found,
        cards=f"{count}{found.device}",
        verdict_class="bad" if not found.fits else "doubt" if word == IN_PART else "good",
        verdict=f"{word[0].upper()}{word[1:]}",
        verdict_details=f":{details}",
        parts=parts,
        end=end,
        stack_words="; ".join(f"{part.name} {format_bytes(part.num_bytes)}" for part in parts),
        beside=[row for row in memory_rows(found) if row[0] not in in_bar],
        load_asked_for=[row for row in load_rows(found) if row[0]],
        speed=[row for row in speed_rows(found, price_per_hour) if row[0]],
        room=_room(found),
        loads=list(_loads(found)),
        commands=[(engine, shell_line(command)) for engine, command in found.launch.items()],
    )


def _parts(found: ServingEstimate) -> tuple[list[Part], float]:
    """The parts in order, and where the card ends: what is missing stands behind that."""
    outside = max(found.non_torch_bytes, found.context_bytes)
    words_of = {name: words for name, _, words in memory_rows(found)}
    sizes = [
        (kind, name, size, words_of.get(name, ""))
        for kind, name, size in (
            ("weights", "weights", found.weights_bytes),
            ("temporaries", "adapters", found.adapter_bytes),
            ("activations", "activations", found.activation_bytes),
            ("graphs", "CUDA graphs", found.graph_bytes),
            ("outside", "CUDA context" if outside == found.context_bytes else "context, communication", outside),
            ("cache", "cache", found.kv_bytes),
        )
    ]
    taken = sum(size for *_, size, _ in sizes)
    unused = found.capacity_bytes - taken
    if unused >= 0:
        sizes.append(("unused", "not used", unused, "left to others"))
    else:
        words = (
            "more than the whole GPU has; the engine takes a share of it"
            if found.takes_a_share
            else "more than the GPU has"
        )
        sizes.append(("missing", "missing", -unused, words))
    # Without room the parts alone are longer than the card.
    whole = max(found.capacity_bytes, taken)
    parts, at = [], 0.0
    for kind, name, size, words in sizes:
        if not size:
            continue
        width = size / whole * _STACK_WIDTH
        begin = found.capacity_bytes / whole * _STACK_WIDTH if kind == "missing" else at
        parts.append(
            Part(
                kind=kind,
                name=name,
                num_bytes=size,
                words=words,
                share=f"{size / found.capacity_bytes:.1%}",
                x=round(begin, 1),
                width=round(width, 1),
            )
        )
        at += width
    return parts, round(found.capacity_bytes / whole * _STACK_WIDTH, 1)


def _room(found: ServingEstimate) -> LineChart | None:
    if found.curves is None or not found.curves.room:
        return None
    lengths, numbers = zip(*found.curves.room, strict=True)
    return line_chart(
        "room-curve",
        "Requests at once over tokens of each",
        "tokens of a request, prompt and answer",
        "requests at once",
        lengths,
        [("requests", numbers)],
        words=lambda tokens, number: f"{number:,.1f} of {tokens:,.0f} tokens",
        is_doubled=True,
    )


def _loads(found: ServingEstimate) -> Iterator[LineChart]:
    if found.curves is None or not found.curves.loads:
        return
    points = found.curves.loads
    rates = [point.rate for point in points]
    for name, title, field in (
        ("first-curve", "Time to the first token over requests per second", "first_token"),
        ("each-curve", "Time per further token over requests per second", "each_token"),
    ):
        pairs = [getattr(point, field) for point in points]
        unit, unit_name = (1.0, "seconds") if max(pair[1] for pair in pairs) >= 1 else (1e-3, "milliseconds")
        yield line_chart(
            name,
            title,
            "requests per second",
            f"{'first token' if field == 'first_token' else 'each token'}, {unit_name}",
            rates,
            [
                ("of half of the requests", [pair[0] / unit for pair in pairs]),
                ("of 99 % of them", [pair[1] / unit for pair in pairs]),
            ],
            words=lambda rate, value, unit=unit: f"{format_seconds(value * unit)} at {rate:.3g} per second",
        )
