"""Which of two plans that fit is taken: the faster one where its seconds say so beyond doubt, else the simpler one."""

import dataclasses
from typing import Any, cast

import pytest
from tests.plans import run as a_run

from tightfit.fit.searching.allowed import Allowed
from tightfit.fit.searching.candidates import Candidate
from tightfit.fit.searching.ranking import MOST_FOR_SIMPLICITY, is_surely_slower, simplest_of_the_fastest
from tightfit.fit.searching.search import Search
from tightfit.fit.searching.variants import Variant
from tightfit.fit.traced_runs import TracedRun
from tightfit.planner.option import Option
from tightfit.simulate.estimate import Estimate, PeakMoment
from tightfit.simulate.seconds_band import SecondsBand


def run(*techniques: str, seconds: float, exact: bool = True, settings: str = "", **doubts: float) -> TracedRun:
    """A run with a technique each, whose seconds may be off by these shares of each kind of work."""
    nothing = cast("Any", None)
    band = SecondsBand(low_seconds=0.9 * seconds, high_seconds=1.1 * seconds, more=doubts, less=doubts)
    estimate = Estimate(
        target="train.py",
        device="NVIDIA GeForce RTX 4090",
        capacity_bytes=24 << 30,
        peak=a_run(8, seconds).peak,
        at_peak={},
        moment=PeakMoment(span="", phase="", operator="", module="", line=""),
        allocation_sites=(),
        spans=(),
        band=(),
        host_peak_bytes=0,
        seconds_per_step=seconds,
        versions={},
        assumptions=(),
        seconds_band=band,
    )
    options = tuple(Option(technique=t, where=t, changes=(), seconds=0.0, exact=exact) for t in techniques)
    of_allocator = Option(technique=settings, where="allocator", changes=(), seconds=0.0, exact=True)
    return TracedRun(
        options=options,
        settings_option=of_allocator if settings else None,
        tape=nothing,
        profile=nothing,
        later=nothing,
        estimate=estimate,
        roots=(),
        notes=(),
        margin="safe",
        call_sizes={},
    )


def taken(best: TracedRun, *others: TracedRun) -> TracedRun:
    nothing = cast("Any", None)
    best_one, *rest = [Candidate(run=each, variant=nothing, solution=nothing) for each in (best, *others)]
    return simplest_of_the_fastest(best_one, [*rest, best_one]).run


def test_a_simpler_plan_is_taken_where_the_times_cannot_be_told_apart() -> None:
    fastest, simple = run("checkpointing", "attention", seconds=1.0), run("checkpointing", seconds=1.005)
    assert not is_surely_slower(simple, fastest)
    assert taken(fastest, simple) is simple


def test_a_faster_plan_is_taken_where_its_time_says_so_beyond_doubt() -> None:
    fastest, simple = run("checkpointing", "attention", seconds=1.0), run("checkpointing", seconds=1.02)
    assert is_surely_slower(simple, fastest)
    assert taken(fastest, simple) is fastest


def test_what_both_have_in_doubt_tells_them_apart_and_what_one_alone_has_does_not() -> None:
    fastest = run("checkpointing", "attention", seconds=1.0, kernels=0.4)
    alike, other = (run("activation_offload", seconds=1.02, kernels=0.4, link=link) for link in (0.0, 0.1))
    assert is_surely_slower(alike, fastest)
    assert taken(fastest, alike) is fastest
    assert not is_surely_slower(other, fastest)
    assert taken(fastest, other) is other


def test_a_doubtful_loss_is_taken_for_simplicity_only_as_far_as_it_is_small() -> None:
    fastest = run("checkpointing", "attention", seconds=1.0)
    slower = run("activation_offload", seconds=1.0 + 2 * MOST_FOR_SIMPLICITY, link=0.3)
    assert not is_surely_slower(slower, fastest)
    assert taken(fastest, slower) is fastest


def test_the_order_in_which_plans_were_found_does_not_matter_and_steps_of_doubt_do_not_add_up() -> None:
    runs = [run(*"abc"[:n], seconds=s) for n, s in ((3, 1.0), (2, 1.008), (1, 1.016))]
    # The simplest is surely slower than the fastest, though not than the one between.
    assert is_surely_slower(runs[2], runs[0])
    assert not is_surely_slower(runs[2], runs[1])
    assert taken(runs[0], runs[1], runs[2]) is taken(runs[0], runs[2], runs[1]) is runs[1]


def test_equal_values_come_before_fewer_techniques() -> None:
    exact, lossy = run("a", "b", seconds=1.0), run("c", seconds=1.0, exact=False)
    assert taken(exact, lossy) is exact
    assert taken(lossy, exact) is exact


def test_a_setting_of_the_allocator_is_a_technique_and_several_places_of_one_are_not() -> None:
    plain, with_settings = run("a", "a", seconds=1.002), run("a", seconds=1.0, settings="allocator_settings")
    assert taken(with_settings, plain) is plain


def test_of_equally_simple_plans_the_faster_one_is_taken() -> None:
    fastest = run("a", seconds=1.0)
    assert taken(fastest, run("b", seconds=1.001), run("c", seconds=1.0)) is fastest


@pytest.mark.parametrize("seconds", [1.0, 1.000001])
def test_without_a_range_seconds_alone_decide(seconds: float) -> None:
    one, other = run("a", "b", seconds=1.0), run("a", seconds=seconds)
    bare = [dataclasses.replace(r, estimate=dataclasses.replace(r.estimate, seconds_band=None)) for r in (one, other)]
    assert is_surely_slower(bare[1], bare[0]) is (seconds > 1.0)


def test_the_simpler_plan_that_is_taken_is_narrowed_to_the_budget_as_the_fastest_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nothing = cast("Any", None)
    search = Search(nothing, 24 << 30, Allowed(), offers=nothing)
    fastest, first, closer = (
        Candidate(run=each, variant=Variant(run=each, problem=nothing, gap_bytes=0), solution=nothing)
        for each in (
            run("checkpointing", "attention", seconds=1.0),
            run("checkpointing", seconds=1.006),
            run("checkpointing", seconds=1.003),
        )
    )
    search.candidates.fitting += [first, fastest]
    asked: list[tuple[Option, ...]] = []

    def narrowed(options: tuple[Option, ...], *_: object, **__: object) -> None:
        asked.append(options)
        search.candidates.fitting.append(closer)

    monkeypatch.setattr(search.candidates, "best_of", narrowed)
    assert search._simplest(fastest, nothing) is closer
    assert asked == [first.run.options]
    search.candidates.fitting[:] = [fastest]
    assert search._simplest(fastest, nothing) is fastest
    assert len(asked) == 1
