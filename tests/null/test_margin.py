"""Which end of a peak's range has to fit, in the same words for an estimate and for a plan."""

import dataclasses

import pytest
from tests.null.test_text_report import ESTIMATE
from tests.plans import a_plan

from tightfit.errors import UsageError
from tightfit.fit import margin_named
from tightfit.planner.explain import reached_limit, sentences, verdict
from tightfit.planner.plan import Alternative, Plan, Run
from tightfit.reports.html.fragment import estimate_fragment
from tightfit.reports.verdicts import verdict_words
from tightfit.simulate.estimate import MARGINS, Peak, needed_bytes, verdict_of

GIB = 1 << 30
PEAK = Peak(
    allocated_bytes=6 * GIB,
    reserved_bytes=7 * GIB,
    device_bytes=8 * GIB,
    device_low_bytes=7 * GIB,
    device_high_bytes=9 * GIB,
)
WORDS = {
    10: ("fits", "fits", "fits"),
    9: ("fits", "fits", "fits"),
    8: ("fits without the safety margin",) * 3,
    7: ("fits at best", "does not fit", "does not fit"),
    6: ("does not fit", "does not fit", "does not fit"),
}


def planned(limit: int, margin: str) -> Plan:
    fits = needed_bytes(PEAK, margin) <= limit * GIB
    return a_plan(run=Run(peak=PEAK, seconds_per_step=1.0), budget_bytes=limit * GIB, fits=fits, margin=margin)


@pytest.mark.parametrize("limit", WORDS)
def test_the_words_of_an_estimate_and_of_a_plan_are_the_same_and_go_with_the_answer(limit: int) -> None:
    for margin, word in zip(MARGINS, WORDS[limit], strict=True):
        estimate = dataclasses.replace(ESTIMATE, peak=PEAK, capacity_bytes=limit * GIB, margin=margin)
        plan = planned(limit, margin)
        assert verdict_of(PEAK, limit * GIB, margin) == verdict_words(estimate)[0] == word
        assert f"<b>{word}, " in estimate_fragment(estimate.to_json())
        assert estimate.fits == plan.fits == (needed_bytes(PEAK, margin) <= limit * GIB)
        # A plan that fits says with what: between the first word and the rest.
        first, *rest = word.split(" ", 1)
        said = verdict(plan).partition(":")[0]
        assert said.startswith(first) and all(said.endswith(part) for part in rest)


def test_a_plan_says_its_margin_and_the_reason_in_one_line() -> None:
    safe = dataclasses.replace(planned(10, "safe"), headroom_bytes=GIB, uncertainty=("choice of library workspaces",))
    line = next(line for line in sentences(safe) if "safety margin" in line)
    assert line.startswith("1.00 GiB safety margin (uncertainty of the peak: choice of library workspaces): ")
    likely = dataclasses.replace(planned(8, "likely"), headroom_bytes=0)
    assert "No safety margin (--margin likely): the peak may be 1.00 GiB higher (uncertainty of the peak)." in list(
        sentences(likely)
    )
    refused = planned(8, "safe")
    assert verdict(refused).endswith("1.00 GiB less than its safety margin needs (--margin likely accepts that)")


def test_a_plan_that_fits_at_best_names_the_lower_end_beside_the_likely_peak() -> None:
    """The likely peak alone would read "fits at best: 8.00 GiB of 7.00 GiB"."""
    assert ": 7.00 GiB to 9.00 GiB, likely 8.00 GiB, of 7.00 GiB on " in verdict(planned(7, "0"))
    assert ": 8.00 GiB of 8.00 GiB on " in verdict(planned(8, "0"))


def test_a_budget_below_what_lies_outside_of_the_allocator_is_said_to_be() -> None:
    below = dataclasses.replace(planned(6, "safe"), budget_bytes=GIB // 2)
    assert (
        "1.00 GiB are the CUDA context and its like, outside of torch's allocator: that alone is more than"
        in reached_limit(below)
    )
    assert reached_limit(planned(6, "safe")).endswith(" over the budget)")


def test_a_plan_from_before_has_the_margin_that_it_was_made_with() -> None:
    old = {
        name: value for name, value in planned(10, "safe").to_json().items() if name not in ("margin", "uncertainty")
    }
    assert Plan.from_json(old).margin == "safe"


def test_another_margin_is_a_usage_error() -> None:
    assert margin_named(0) == "0"
    with pytest.raises(UsageError, match=r"--margin 5: give 0 \(the lower end"):
        margin_named("5")


def test_optimal_is_said_of_predicted_seconds_beside_what_the_trace_takes() -> None:
    """The simulated step takes 120 ms."""
    said = {
        0.119: "Optimal under the cost model (predicted 119.0 ms, simulated 120.0 ms).",
        0.1: "Optimal under the cost model, which is -17% off here (predicted 100.0 ms, simulated 120.0 ms): another plan may be faster in a real run.",
    }
    for predicted, line in said.items():
        assert line in list(sentences(a_plan(predicted_seconds=predicted)))
    faster = Alternative(
        name="attention", device_bytes=9 << 30, seconds_per_step=0.1199, fits=True, exact=True, why="fits"
    )
    alike = list(sentences(a_plan(predicted_seconds=0.119, alternatives=(faster,))))
    assert (
        "The simplest of the plans whose times cannot be told from the fastest one's (predicted 119.0 ms, simulated 120.0 ms)."
        in alike
    )
    interrupted = "\n".join(sentences(a_plan(is_interrupted=True, predicted_seconds=0.119)))
    assert (
        "Not known to be the fastest (predicted 119.0 ms, simulated 120.0 ms): the search was interrupted."
        in interrupted
    )
