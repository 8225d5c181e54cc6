"""`tightfit plan --ladder`: plans for one workload, from the fastest to the one that holds least, for a guarded run to go down by."""

from typing import Any

from tightfit.errors.faults import answering
from tightfit.fit.planning import planner
from tightfit.reports.plans import Plan
from tightfit.simulate.estimate import needed_bytes

# Two plans with which the allocator holds about the same are one rung.
_LEAST_STEP = 0.03


@answering("the planner")
def ladder(target: str, device: str, *, num_plans: int, **settings: Any) -> list[Plan]:
    """At most `num_plans` plans: the fastest within the budget, the one that holds least, and others for budgets evenly between their peaks.

    torch's allocator holds at least 3 % less with each than with the one before, so there may be fewer. A plan without techniques, where the workload fits as it is, is none of
    them. The settings are those of `tightfit.plan`. If nothing fits, the one plan does not. Interrupted (Ctrl-C), it returns those that were found.
    """
    made = planner(target, device, **settings)
    fastest = made.within(made.budget_bytes)
    if not fastest.fits or fastest.is_interrupted or num_plans < 2:
        return [fastest]
    try:
        # No run holds nothing: the answer is the plan with the lowest peak.
        least = made.within(0)
    except KeyboardInterrupt:
        return [fastest]
    lowest, highest = (needed_bytes(each.run.peak, each.margin) for each in (least, fastest))
    found = [fastest]
    num_steps = num_plans - 1 if fastest.choices else num_plans
    for number in range(1, num_steps + 1):
        try:
            between = made.within(highest - (highest - lowest) * number // num_steps)
        except KeyboardInterrupt:
            break
        if between.fits and _is_rung(between, found[-1]):
            found.append(between)
        if between.is_interrupted:
            break
    return [each for each in found if each.choices] or found[:1]


def _is_rung(plan: Plan, before: Plan) -> bool:
    return plan.run.peak.reserved_bytes <= (1 - _LEAST_STEP) * before.run.peak.reserved_bytes
