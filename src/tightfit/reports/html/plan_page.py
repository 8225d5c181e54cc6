"""A plan as one HTML page that needs nothing else and runs no script: the answer, what was chosen, what memory is worth, and why.

Its policy lets it load nothing and run nothing. It is built as a tree of elements, so what a plan says stands in it as text, never as markup.
"""

import base64
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from xml.etree.ElementTree import Element

from tightfit.planner.explain import groups, reached_limit, sentences, verdict
from tightfit.planner.plan import Plan
from tightfit.reports.html.markup import Content, document, element, table
from tightfit.reports.html.plan_curve import curve, curve_points, seconds_per_gib
from tightfit.units import format_bytes, format_seconds

_FOLDER = Path(__file__).with_name("page")


def plan_page(plan: Plan) -> str:
    """The whole page."""
    styles = "".join((_FOLDER / name).read_text(encoding="utf-8") for name in ("page.css", "plan.css"))
    digest = base64.b64encode(hashlib.sha256(styles.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{os.path.basename(plan.target)}: memory plan"),
        element("style", styles),
    )
    subject = f"planned for {plan.device}: {format_bytes(plan.budget_bytes)} of its {format_bytes(plan.capacity_bytes)}"
    header = element(
        "header",
        element("div", element("h1", plan.target), element("p", subject), class_="subject"),
        class_="top",
    )
    main = element("main", *_sections(plan))
    return document(element("html", head, element("body", header, main), lang="en"))


def _sections(plan: Plan) -> Iterator[Element]:
    yield _answer(plan)
    yield _section("What memory is worth", *_curve(plan))
    if plan.choices:
        yield _section("What is chosen", _choices(plan))
    if plan.alternatives:
        yield _section("What else was considered", _alternatives(plan))
    for heading, lines in (("Why", _why(plan)), ("What you could do besides", plan.advice)):
        if items := [element("li", line) for line in lines]:
            yield _section(heading, element("ul", *items))
    yield _section("What was assumed" if plan.assumptions else "Nothing was assumed", *_assumptions(plan))


def _section(heading: str, *content: Content) -> Element:
    name = "-".join(heading.lower().split())
    return element("section", element("h2", heading, id=name), *content, aria_labelledby=name)


def _answer(plan: Plan) -> Element:
    word, _, rest = verdict(plan).partition(":")
    heading = element(
        "h2",
        element("span", word[0].upper() + word[1:], class_="good" if plan.fits else "bad"),
        f":{rest}",
        class_="verdict",
        id="verdict",
    )
    runs = [("plain", plan.baseline), *([("planned", plan.run)] if plan.choices else [])]
    rows: list[list[Content]] = [
        [
            name,
            format_bytes(run.peak.device_bytes),
            f"{format_bytes(run.peak.device_low_bytes)} to {format_bytes(run.peak.device_high_bytes)}",
            format_bytes(run.peak.reserved_bytes),
            format_bytes(run.peak.allocated_bytes),
            format_seconds(run.seconds_per_step),
        ]
        for name, run in runs
    ]
    headings = ["", "peak on the card", "from, to", "peak reserved", "peak allocated", "a step"]
    runs_table = table(headings, rows, caption="The plain run and the planned one", numbers=frozenset(range(1, 6)))
    moved = [f"{format_bytes(plan.host_bytes)} in the host's memory"] if plan.host_bytes else []
    moved += [f"{format_bytes(plan.disk_bytes)} on disk"] if plan.disk_bytes else []
    also = element("p", f"The plan holds {' and '.join(moved)} besides.", class_="hint") if moved else None
    return element("section", heading, runs_table, also, aria_labelledby="verdict")


def _curve(plan: Plan) -> Iterator[Element]:
    points = curve_points(plan)
    if not points:
        yield element("p", "No technique had anything to offer, so there is no curve to show.", class_="hint")
        return
    rows: list[list[Content]] = [
        [
            format_bytes(point.device_bytes),
            format_seconds(point.seconds_per_step),
            "" if rate is None else format_seconds(rate),
        ]
        for point, rate in zip(points, seconds_per_gib(points), strict=True)
    ]
    headings = ["on the card", "a step", "a GiB more saves"]
    caption = "The points of the curve"
    yield element(
        "div",
        curve(plan),
        table(headings, rows, caption=caption, numbers=frozenset({1, 2})),
        class_="plot",
        tabindex="0",
        role="group",
        aria_label="The curve and its points",
    )
    yield element(
        "p",
        "The curve is the least seconds that the options promise, looked for at a row of sizes; the marks are traced runs, and the line through "
        "each is the range of its peak. A plan fits if the upper end does. The axes do not begin at 0.",
        class_="hint",
    )


def _choices(plan: Plan) -> Element:
    rows: list[list[Content]] = [
        [
            group.technique,
            element("span", group.where, class_="place"),
            str(group.num_places),
            format_bytes(group.saves_bytes) if group.saves_bytes else "",
            format_seconds(group.adds_seconds) if group.adds_seconds else "",
            "yes" if group.exact else "no",
            element("span", group.settings, class_="place"),
        ]
        for group in groups(plan.choices)
    ]
    headings = ["technique", "where", "places", "saves", "adds a step", "exact", "settings"]
    return table(headings, rows, caption="What is chosen", numbers=frozenset({2, 3, 4}))


def _alternatives(plan: Plan) -> Element:
    fits = {True: "yes", False: "no", None: "not traced"}
    rows: list[list[Content]] = [
        [
            a.name,
            "" if a.device_bytes is None else format_bytes(a.device_bytes),
            "" if a.seconds_per_step is None else format_seconds(a.seconds_per_step),
            fits[a.fits],
            "yes" if a.exact else "no",
            a.why,
        ]
        for a in plan.alternatives
    ]
    headings = ["", "on the card", "a step", "fits", "exact", "why"]
    return table(headings, rows, caption="What else was considered", numbers=frozenset({1, 2}))


def _why(plan: Plan) -> Iterator[str]:
    if limit := reached_limit(plan):
        yield f"{limit[0].upper()}{limit[1:]}."
    yield from list(sentences(plan))[1:]


def _assumptions(plan: Plan) -> Iterator[Element]:
    where: dict[str, list[str]] = {}
    for assumption in plan.assumptions:
        where.setdefault(assumption.what, []).append(assumption.where)
    items = [
        element("li", what, element("span", f" ({', '.join(dict.fromkeys(places))})", class_="hint"))
        for what, places in where.items()
    ]
    if items:
        yield element("ul", *items)
    versions = ", ".join(f"{name} {version}" for name, version in plan.versions.items() if version)
    yield element("p", f"With {versions}. " if versions else "", "Colours after Okabe and Ito.", class_="hint")
