"""A plan in words: techniques and reasons, the value of more memory, or why nothing fits and by how much.

Choices that differ only in a number of their path are one line: `h.0` to `h.7` is `h.[0-7]`.
"""

import dataclasses
import re
from collections.abc import Iterator, Sequence

from tightfit.planner.place_words import place_words
from tightfit.planner.plan import Choice, Plan
from tightfit.planner.setting_words import setting_words
from tightfit.simulate.estimate import peak_of_limit, verdict_of
from tightfit.units import GIB, MINUS, format_bytes, format_bytes_up, format_seconds

# Beyond that share "optimal" is said with what the prediction is off by.
_MAX_OFF = 0.05
# A step that is that much longer, and longer by that many times the share of memory that is saved: checkpointing of every block takes a third
# more time for half of the memory.
_SLOW, _POOR = 0.5, 5.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceGroup:
    """Choices of one technique with one setting at places that differ only by a number, merged."""

    technique: str
    where: str
    settings: str
    num_places: int
    saves_bytes: int
    adds_seconds: float
    exact: bool


def groups(choices: Sequence[Choice]) -> list[ChoiceGroup]:
    """The choices by technique, place and settings, those that save most first."""
    together: dict[tuple[str, str, str], list[Choice]] = {}
    for choice in choices:
        settings = setting_words(choice.settings)
        together.setdefault((choice.technique, re.sub(r"\d+", "#", choice.where), settings), []).append(choice)
    found = [
        ChoiceGroup(
            technique=technique,
            where=_places([choice.where for choice in members]),
            settings=settings,
            num_places=len(members),
            saves_bytes=sum(choice.saves_bytes for choice in members),
            adds_seconds=sum(choice.adds_seconds for choice in members),
            exact=all(choice.exact for choice in members),
        )
        for (technique, _, settings), members in together.items()
    ]
    return sorted(found, key=lambda group: -group.saves_bytes)


def _places(paths: Sequence[str]) -> str:
    words = place_words(paths)
    return f"{words} ({len(paths)} places)" if "*" in words else words


def verdict(plan: Plan) -> str:
    """The result in one line."""
    if plan.is_changed:
        return f"changed by hand: what it needs with {number_of_techniques(plan)} is not known; tightfit run --virtual --plan simulates it"
    budget = f"{format_bytes(plan.budget_bytes)} on {plan.device}"
    not_seen = f"; {plan.coverage.words}" if plan.coverage.words else ""
    peak = plan.run.peak
    word = verdict_of(peak, plan.budget_bytes, plan.margin, is_whole=plan.coverage.is_whole)
    so_far = "; the search was interrupted, this is the best so far" if plan.is_interrupted else ""
    of_it = f"{peak_of_limit(peak, plan.budget_bytes)} on {plan.device}"
    if plan.fits and not plan.choices:
        return f"{word.replace('fits', 'fits without changes', 1).replace(' without the', ', but without the')}: {of_it}{not_seen}"
    if plan.fits:
        return f"{word.replace('fits', f'fits with {number_of_techniques(plan)}', 1)}: {of_it}{not_seen}{so_far}"
    missing = format_bytes_up(plan.missing_bytes)
    if word != "does not fit":
        return f"{word}: {of_it}, {missing} less than its safety margin needs (--margin likely accepts that){so_far}"
    return f"{word}: {missing} more than {budget}{so_far or ', even with every allowed technique'}"


def number_of_techniques(plan: Plan) -> str:
    """`1 technique`, or `4 techniques (20 places)`."""
    techniques, places = len({choice.technique for choice in plan.choices}), len(plan.choices)
    words = f"{techniques} technique{'' if techniques == 1 else 's'}"
    return words if places == techniques else f"{words} ({places} places)"


def sentences(plan: Plan) -> Iterator[str]:
    """The reasons for this plan, a sentence each."""
    yield verdict(plan) + "."
    plain, run = plan.baseline, plan.run
    if not plan.has_planned_run:
        return
    slower = run.seconds_per_step / plain.seconds_per_step - 1 if plain.seconds_per_step else 0.0
    yield (
        f"The plain run needs {format_bytes(plain.peak.device_bytes)}, the planned run {format_bytes(run.peak.device_bytes)}; "
        f"time per step: {format_seconds(run.seconds_per_step)} instead of {format_seconds(plain.seconds_per_step)} ({_percent(slower)})."
    )
    yield from _poor_trade(plan)
    yield f"Peak: predicted {format_bytes(plan.promised_bytes)}, simulated {format_bytes(run.peak.device_bytes)}."
    yield from _margin(plan)
    if plan.fits:
        yield _optimality(plan)
    if plan.exact:
        yield _proof(plan)
    yield from _more_memory(plan)


def poor_trade(plan: Plan) -> str:
    """What a plan costs that takes much time for little memory: `a poor trade: ...`; empty for others."""
    plain, run = plan.baseline, plan.run
    if not (plan.has_planned_run and plain.seconds_per_step and plain.peak.device_bytes):
        return ""
    times = run.seconds_per_step / plain.seconds_per_step
    saved = plain.peak.device_bytes - run.peak.device_bytes
    share = saved / plain.peak.device_bytes
    if times - 1 < max(_SLOW, _POOR * share):
        return ""
    less = f"{share:.1%} less memory ({format_bytes(saved)})" if saved > 0 else "no less memory"
    return f"a poor trade: each step takes {times:.1f} times as long, for {less}"


def _poor_trade(plan: Plan) -> Iterator[str]:
    if poor := poor_trade(plan):
        others = ": look at the other suggestions first" if plan.advice else ""
        yield f"{poor[0].upper()}{poor[1:]}{others or ', and a smaller batch may cost less'}."


def _optimality(plan: Plan) -> str:
    """What is known of how fast another choice could be: a statement about predicted seconds, beside what the traced run takes."""
    simulated = plan.run.seconds_per_step
    predicted = simulated if plan.predicted_seconds is None else plan.predicted_seconds
    seconds = f"predicted {format_seconds(predicted)}, simulated {format_seconds(simulated)}"
    if plan.is_interrupted:
        return f"Not known to be the fastest ({seconds}): the search was interrupted."
    if any(each.fits and each.seconds_per_step and each.seconds_per_step < simulated for each in plan.alternatives):
        return f"The simplest of the plans whose times cannot be told from the fastest one's ({seconds})."
    off = predicted / simulated - 1 if simulated else 0.0
    if plan.bound.is_proven and abs(off) <= _MAX_OFF:
        return f"Optimal under the cost model ({seconds})."
    if plan.bound.is_proven:
        return f"Optimal under the cost model, which is {off:+.0%} off here ({seconds}): another plan may be faster in a real run."
    return f"The fastest plan found ({seconds}); under the cost model no plan takes less than {format_seconds(plan.bound.seconds_per_step)}."


def _percent(share: float) -> str:
    return f"{share:+.1%}".replace("-", MINUS)


def _margin(plan: Plan) -> Iterator[str]:
    """The safety margin and its reason."""
    causes = (
        f"uncertainty of the peak: {', '.join(plan.uncertainty)}" if plan.uncertainty else "uncertainty of the peak"
    )
    more = plan.run.peak.device_high_bytes - plan.run.peak.device_bytes
    if plan.headroom_bytes:
        yield (
            f"{format_bytes(plan.headroom_bytes)} safety margin ({causes}): an allocator that runs out of memory frees its cache and "
            "allocates again, which costs more time than any technique; --margin likely plans without it."
        )
    elif plan.margin != "safe" and more:
        yield f"No safety margin (--margin {plan.margin}): the peak may be {format_bytes(more)} higher ({causes})."


def _proof(plan: Plan) -> str:
    """The evidence that the plan is exact."""
    if plan.proof.kind == "values":
        return f"Exact, verified by values: {plan.proof.what}."
    why = f" ({plan.proof.what})" if plan.proof.what else ""
    return f"Exact by structure{why}: each technique preserves losses and gradients, and the first steps of a real run are checked."


def _more_memory(plan: Plan) -> Iterator[str]:
    """The time that more memory than the budget saves, up to a GiB of it, from the memory/time curve."""
    # As predicted, since the curve is, whose points are budgets: the safety margin is in them. A faster plan that this budget had room for
    # would have been found.
    now_bytes = max(plan.budget_bytes, plan.promised_bytes + plan.headroom_bytes)
    now_seconds = plan.run.seconds_per_step if plan.predicted_seconds is None else plan.predicted_seconds
    more = sorted((p for p in plan.frontier if p.device_bytes > now_bytes), key=lambda point: point.device_bytes)
    if not more:
        return
    within = [p for p in more if p.device_bytes - now_bytes <= GIB]
    if within:
        best = min(within, key=lambda point: (point.seconds_per_step, point.device_bytes))
        saved, memory = now_seconds - best.seconds_per_step, best.device_bytes - now_bytes
        told = f"{format_bytes_up(memory)} more"
    else:
        # The slope up to the next point of the curve, which is convex only roughly.
        saved, told = (
            (now_seconds - more[0].seconds_per_step) / (more[0].device_bytes - now_bytes) * GIB,
            "One more GiB",
        )
    if saved > 0:
        yield f"{told} would save about {format_seconds(saved)} per step."


def reached_limit(plan: Plan) -> str:
    """Why nothing fits: the lowest peak found with every allowed technique; empty for a plan that fits."""
    if plan.fits:
        return ""
    peak = plan.run.peak
    outside_bytes = peak.device_bytes - peak.reserved_bytes
    return (
        f"lowest peak found: {format_bytes(peak.device_bytes)} (upper bound {format_bytes_up(peak.device_high_bytes)}, "
        f"{format_bytes_up(plan.missing_bytes)} over the budget)"
        + (
            f"; {format_bytes(outside_bytes)} are the CUDA context and its like, outside of torch's allocator: that alone is more than the budget"
            if outside_bytes > plan.budget_bytes
            else ""
        )
    )
