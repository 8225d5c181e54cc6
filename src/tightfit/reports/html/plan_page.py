"""A plan as one HTML page that needs nothing else and runs no script: the verdict, the techniques, the memory/time trade-off, and why.

The page is the template `page/plan.html`; its policy lets it load nothing and run nothing. What the template shows is worked out here.
"""

import os
from collections.abc import Iterator

from tightfit.planner.explain import groups, reached_limit, sentences, verdict
from tightfit.planner.plan import Plan
from tightfit.reports.html.assets import content_policy, styles
from tightfit.reports.html.plan_curve import curve_of, curve_points, seconds_per_unit
from tightfit.reports.html.templates import render
from tightfit.units import format_bytes, format_seconds

# Of the capacity or the time: what can be seen in the picture.
_VISIBLE_SHARE = 0.003


def plan_page(plan: Plan) -> str:
    """The whole page."""
    page_styles = styles("page.css", "plan.css")
    word, _, details = verdict(plan).partition(":")
    points = curve_points(plan)
    curve = curve_of(plan) if points else None
    return render(
        "plan.html",
        title=f"{os.path.basename(plan.target)}: memory plan",
        policy=content_policy(styles=page_styles),
        styles=page_styles,
        plan=plan,
        verdict=word[0].upper() + word[1:],
        verdict_details=details,
        runs=[("plain", plan.baseline), *([("planned", plan.run)] if plan.has_planned_run else [])],
        moved=list(_moved(plan)),
        curve=curve,
        points=[] if curve is None else list(zip(points, seconds_per_unit(points, curve.bytes_of_unit), strict=True)),
        choices=groups(plan.choices),
        why=list(_why(plan)),
        assumptions=_places_by_assumption(plan),
        beside=_beside_the_curve(plan),
        fitting_end=_FITTING_ENDS.get(plan.margin, plan.margin),
        versions=[f"{name} {version}" for name, version in plan.versions.items() if version],
    )


# What of a peak's range has to be within the budget, by the margin that was asked for.
_FITTING_ENDS = {"0": "its lower end", "likely": "the mark itself", "safe": "its upper end"}


def _moved(plan: Plan) -> Iterator[str]:
    """What the plan needs besides GPU memory."""
    if plan.host_bytes:
        yield f"{format_bytes(plan.host_bytes)} in the host's memory"
    if plan.disk_bytes:
        yield f"{format_bytes(plan.disk_bytes)} on disk"


def _why(plan: Plan) -> Iterator[str]:
    if not plan.is_changed and (limit := reached_limit(plan)):
        yield f"{limit[0].upper()}{limit[1:]}."
    yield from list(sentences(plan))[1:]


def _beside_the_curve(plan: Plan) -> str:
    """Why the mark of the plan is not on the curve, in a sentence; empty where nobody sees a difference."""
    if not plan.has_planned_run:
        return ""
    run, predicted = plan.run, plan.bound.seconds_per_step
    figures = []
    if abs(run.peak.device_bytes - plan.promised_bytes) > _VISIBLE_SHARE * plan.capacity_bytes:
        figures.append(
            f"predicted {format_bytes(plan.promised_bytes)}, simulated {format_bytes(run.peak.device_bytes)}"
        )
    # A bound that is not proven is no prediction of this plan.
    if plan.bound.is_proven and abs(run.seconds_per_step - predicted) > _VISIBLE_SHARE * run.seconds_per_step:
        figures.append(f"predicted {format_seconds(predicted)}, simulated {format_seconds(run.seconds_per_step)}")
    return f"The plan's mark is beside the curve: {'; '.join(figures)}. " if figures else ""


def _places_by_assumption(plan: Plan) -> dict[str, list[str]]:
    """Each assumption once, with the places it was made at, each once."""
    places: dict[str, dict[str, None]] = {}
    for assumption in plan.assumptions:
        places.setdefault(assumption.what, {})[assumption.where] = None
    return {what: list(where) for what, where in places.items()}
