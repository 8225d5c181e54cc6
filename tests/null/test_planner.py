"""The planner as a specification: what a problem keeps of a run, and that no choice is better than the one that is found."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tightfit.planner.option import Change, Option
from tightfit.planner.problem import Problem, build, parts_of, together, with_taken
from tightfit.planner.reached_at_once import is_reached_at_once
from tightfit.planner.sides import Sides
from tightfit.planner.solution import Solution, validate
from tightfit.planner.solve import Tricks, _Program, least, solve

MIB = 1 << 20
NUM_EVENTS = 24


def option(
    where: str,
    *changes: tuple[int, int, float],
    seconds: float = 1.0,
    slots: tuple[str, ...] = (),
    equivalence_class: str = "",
    sides: Sides | None = None,
) -> Option:
    """An option whose changes are (begin, end, MiB)."""
    return Option(
        technique="t",
        where=where,
        equivalence_class=equivalence_class,
        changes=tuple(Change(begin=b, end=e, num_bytes=round(n * MIB)) for b, e, n in changes),
        seconds=seconds,
        sides=sides,
        exact=True,
        slots=frozenset(slots),
    )


def timeline(*mebibytes: int) -> np.ndarray:
    return np.array(mebibytes, dtype=np.int64) * MIB


def test_a_problem_keeps_the_highest_moment_of_each_stretch() -> None:
    problem = build(timeline(1, 5, 3, 9, 7, 2), [option("a", (2, 5, -4))])
    assert problem.peak_bytes(()) == 9 * MIB
    assert problem.peak_bytes([0]) == 5 * MIB
    assert sorted(problem.events.tolist()) == [1, 3]


def test_moments_that_can_never_be_the_peak_are_left_out() -> None:
    problem = build(timeline(10, 1, 10, 2, 10), [option("a", (0, 1, -2)), option("b", (2, 3, -2))])
    assert 1 * MIB not in problem.base_bytes
    assert problem.peak_bytes([0, 1]) == 10 * MIB


def test_options_of_one_slot_exclude_each_other_and_a_smaller_group_says_nothing_new() -> None:
    saving = (0, 1, -1)
    options = [
        option("a", saving, slots=("x", "y")),
        option("b", saving, slots=("x", "y")),
        option("c", saving, slots=("x",)),
        option("d", saving),
    ]
    assert build(timeline(1), options).conflicts == ((0, 1, 2),)


def test_an_option_that_another_one_at_its_place_beats_is_left_out() -> None:
    options = [
        option("a", (0, 2, -4), seconds=2.0, slots=("a",)),
        option("a", (0, 1, -4), seconds=3.0, slots=("a",)),
        option("a", (0, 2, -5), seconds=3.0, slots=("a",)),
        option("worthless", seconds=0.5),
    ]
    assert build(timeline(9, 9), options).options == (options[0], options[2])


def test_options_that_save_next_to_nothing_each_are_kept_where_they_are_many() -> None:
    def options(number: int) -> list[Option]:
        return [option(f"h.{i}", (0, 1, -1 / 64), equivalence_class="h", slots=(f"h.{i}",)) for i in range(number)]

    # Each saves a 4096th of the peak.
    assert len(build(timeline(64), options(256)).options) == 256
    assert not build(timeline(64), options(200)).options


def test_an_option_that_moves_more_to_the_host_leaves_the_one_that_moves_nothing() -> None:
    plain = option("a", (0, 2, -4), seconds=2.0, slots=("a",))
    moving = dataclasses.replace(option("a", (0, 2, -5), seconds=2.0, slots=("a",)), host_bytes=MIB)
    assert build(timeline(9, 9), [plain, moving], host_bytes=MIB).options == (plain, moving)
    assert build(timeline(9, 9), [moving, dataclasses.replace(plain, host_bytes=MIB)], host_bytes=MIB).options == (
        moving,
    )


def test_nothing_to_choose_from_is_the_plain_run() -> None:
    problem = build(timeline(3, 4), [])
    assert solve(problem, 4 * MIB).fits
    assert not solve(problem, 3 * MIB).fits
    assert solve(problem, 3 * MIB).peak_bytes == 4 * MIB


def test_what_costs_nothing_less_is_taken_even_if_the_run_fits() -> None:
    problem = build(timeline(3), [option("faster", (0, 1, 1), seconds=-1.0), option("slower", (0, 1, -1), seconds=1.0)])
    assert solve(problem, 10 * MIB).chosen == (0,)
    assert solve(problem, 3 * MIB).chosen == ()


def test_what_is_settled_leaves_the_others_a_share_where_it_saves_and_takes_those_of_its_slots_away() -> None:
    halves = dataclasses.replace(option("half", (1, 3, -4), (4, 5, 1), slots=("batch",)), leaves_share=0.5)
    others = [option("a", (1, 2, -6), (3, 4, -6)), option("b", (1, 2, -6), slots=("batch",))]
    problem = build(timeline(1, 10, 9, 10, 8), others)
    left = with_taken(problem, [halves])
    assert [o.where for o in left.options] == ["a"]
    at = {int(event): column for column, event in enumerate(left.events)}
    assert [int(left.base_bytes[at[e]]) // MIB for e in (1, 3)] == [6, 10]
    assert [int(left.changes[0, at[e]]) // MIB for e in (1, 3)] == [-3, -6]
    assert left.peak_bytes(()) == 10 * MIB


def test_what_is_moved_to_the_host_has_a_budget_of_its_own() -> None:
    moving = [
        dataclasses.replace(option(name, (0, 1, -4), seconds=1.0), host_bytes=4 * MIB) for name in ("a", "b", "c")
    ]
    problem = build(timeline(12), [*moving, option("dear", (0, 1, -4), seconds=9.0)], host_bytes=8 * MIB)
    found = solve(problem, 0)
    assert len(set(found.chosen) & {0, 1, 2}) == 2 and 3 in found.chosen
    assert found.fits and found.peak_bytes == 0
    greedy = dataclasses.replace(found, chosen=(0, 1, 2), seconds=3.0, peak_bytes=0, bound_seconds=3.0)
    assert any("moved to the host" in fault for fault in validate(problem, greedy, 0))


def test_a_slower_tier_is_taken_where_the_faster_one_is_full() -> None:
    def at(place: str) -> list[Option]:
        host, disk = (
            option(place, (0, 1, -4), seconds=s, slots=(place,), equivalence_class=str(s)) for s in (1.0, 9.0)
        )
        return [
            dataclasses.replace(host, host_bytes=4 * MIB),
            dataclasses.replace(disk, settings={"tier": "disk"}, host_bytes=MIB, disk_bytes=4 * MIB),
        ]

    options = [each for place in "abc" for each in at(place)]
    found = solve(build(timeline(12), options, host_bytes=6 * MIB, disk_bytes=8 * MIB), 0)
    assert found.fits and found.is_proven and found.seconds == pytest.approx(1.0 + 2 * 9.0)
    # With room for all at the host, the disk is of no use.
    assert solve(build(timeline(12), options, host_bytes=12 * MIB, disk_bytes=8 * MIB), 0).seconds == pytest.approx(3.0)
    assert not solve(build(timeline(12), options, host_bytes=6 * MIB, disk_bytes=4 * MIB), 0).fits


def test_if_nothing_fits_the_least_is_answered() -> None:
    problem = build(timeline(8), [option("a", (0, 1, -2)), option("b", (0, 1, -3), seconds=5.0)])
    found = solve(problem, 2 * MIB)
    assert (found.fits, found.chosen, found.peak_bytes) == (False, (0, 1), 3 * MIB)
    assert least(problem).chosen == (0, 1)


def test_the_least_may_hold_next_to_nothing_more_where_that_is_faster() -> None:
    # What is faster holds 4 KiB more at the peak; elsewhere it saves, which leaves the allocator with fewer segments.
    faster = option("a", (1, 2, 4 / 1024), (2, 3, -4), seconds=-1.0)
    assert least(build(timeline(9, 10, 9), [faster])).chosen == (0,)
    larger = option("a", (1, 2, 1), (2, 3, -4), seconds=-1.0)
    assert least(build(timeline(9, 10, 9), [larger])).chosen == ()


def _choices(problem: Problem) -> list[tuple[int, ...]]:
    """Every choice that takes at most one option of each conflict."""
    indices = range(len(problem.options))
    subsets = itertools.chain.from_iterable(itertools.combinations(indices, k) for k in range(len(problem.options) + 1))
    return [c for c in subsets if all(len(set(c) & set(group)) <= 1 for group in problem.conflicts)]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    base = draw(st.lists(st.integers(0, 40), min_size=NUM_EVENTS, max_size=NUM_EVENTS))
    options = []
    for index in range(draw(st.integers(0, 7))):
        changes = []
        for _ in range(draw(st.integers(0, 3))):
            begin = draw(st.integers(0, NUM_EVENTS - 1))
            changes.append((begin, draw(st.integers(begin, NUM_EVENTS)), draw(st.integers(-20, 4))))
        slots = tuple(draw(st.sets(st.sampled_from("xyz"), max_size=2)))
        on_card, on_host = (draw(st.integers(-1, 8)) / 8 for _ in range(2))
        sides = draw(st.sampled_from([None, Sides(on_card=on_card, on_host=on_host)]))
        made = option(str(index), *changes, seconds=on_card, slots=slots, sides=sides)
        options.append(dataclasses.replace(made, host_bytes=draw(st.sampled_from([0, 0, MIB, 3 * MIB]))))
    step = Sides(on_card=draw(st.integers(0, 16)) / 8, on_host=draw(st.integers(0, 16)) / 8)
    return build(timeline(*base), options, step=step, host_bytes=64 * MIB)


@st.composite
def places_alike(draw: st.DrawFn) -> Problem:
    """Two or three places with the same options, which save the same and hold as much more, each for as long and where it happens to."""
    base = draw(st.lists(st.integers(0, 40), min_size=NUM_EVENTS, max_size=NUM_EVENTS))
    kinds = draw(
        st.lists(st.tuples(st.integers(-20, -1), st.integers(0, 9), st.integers(0, 8)), min_size=1, max_size=2)
    )
    are_alone, options = draw(st.booleans()), []
    for place in range(draw(st.integers(2, 3))):
        for saved, held, eighths in kinds:
            begin, end = sorted(draw(st.lists(st.integers(0, NUM_EVENTS), min_size=2, max_size=2, unique=True)))
            at = draw(st.integers(0, NUM_EVENTS - 1))
            options.append(
                option(
                    f"h.{place}",
                    (begin, end, saved),
                    (at, at + 1, held),
                    seconds=eighths / 8,
                    slots=(f"h.{place}",) if are_alone else (),
                    equivalence_class=f"h.*:{saved}",
                )
            )
    begin, end = draw(st.integers(0, NUM_EVENTS - 1)), draw(st.integers(0, NUM_EVENTS))
    around = option("h", (min(begin, end), end, -20), seconds=1.5, slots=("h.0", "h.1"))
    return build(timeline(*base), [*options, around])


@settings(max_examples=90, deadline=None)
@given(problem=st.one_of(problems(), places_alike()), budget=st.integers(0, 45))
def test_no_choice_is_faster_and_none_of_the_same_speed_moves_or_holds_less(problem: Problem, budget: int) -> None:
    found = solve(problem, budget * MIB)
    assert validate(problem, found, budget * MIB) == []
    assert found.is_proven
    ranked = [
        (round(problem.seconds_of(c), 6), problem.moved_bytes(c), problem.peak_bytes(c)) for c in _choices(problem)
    ]
    fitting = [r for r in ranked if r[2] <= budget * MIB]
    if fitting:
        assert (round(found.seconds, 6), problem.moved_bytes(found.chosen), found.peak_bytes) == min(fitting)
        assert found.bound_seconds == pytest.approx(found.seconds, abs=1e-6)
    else:
        assert not found.fits
        assert found.peak_bytes == min(peak for *_, peak in ranked)


@settings(max_examples=60, deadline=None)
@given(problem=problems(), limit=st.integers(0, 45))
def test_what_is_said_to_be_reached_at_once_can_be_reached(problem: Problem, limit: int) -> None:
    least_bytes = min(problem.peak_bytes(choice) for choice in _choices(problem))
    assert least_bytes <= limit * MIB or not is_reached_at_once(problem, limit * MIB)
    assert is_reached_at_once(problem, problem.peak_bytes(()))


def test_many_blocks_of_which_each_lowers_the_peak_a_little_reach_far() -> None:
    base = [40] * 6
    options = [option(str(block), (block, block + 1, -9), slots=(f"block{block}",)) for block in range(6)]
    options += [option(str(block), (block, block + 1, -5), slots=(f"block{block}",)) for block in range(6)]
    problem = build(timeline(*base), options)
    assert is_reached_at_once(problem, 31 * MIB)
    assert not is_reached_at_once(problem, 30 * MIB)


@settings(max_examples=40, deadline=None)
@given(problem=problems(), budgets=st.lists(st.integers(0, 45), min_size=2, max_size=4))
def test_a_smaller_budget_never_yields_a_larger_peak_or_a_faster_step(problem: Problem, budgets: list[int]) -> None:
    found = [solve(problem, budget * MIB) for budget in sorted(budgets, reverse=True)]
    fitting = [solution for solution in found if solution.fits]
    for larger, smaller in itertools.pairwise(fitting):
        assert smaller.peak_bytes <= larger.peak_bytes
        assert smaller.seconds >= larger.seconds - 1e-9


@given(
    step=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    added=st.lists(st.tuples(st.integers(-2, 9), st.integers(-2, 9)), max_size=5),
)
def test_the_parts_of_options_are_what_they_add_together(step: tuple[int, int], added: list[tuple[int, int]]) -> None:
    sides = Sides(on_card=step[0], on_host=step[1])
    options = [option("a", sides=Sides(on_card=card, on_host=host)) for card, host in added]
    assert sum(parts_of(sides, options)) == pytest.approx(sides.added(together(options)), abs=1e-9)


def test_what_hides_behind_the_slower_side_is_free_once() -> None:
    saving = (0, 2, -10)
    on_host = Sides(on_host=3.0)
    options = [option(str(i), saving, seconds=0.0, sides=on_host) for i in range(3)]
    options.append(option("other", (0, 2, -30), seconds=2.0, sides=Sides.both(2.0)))
    problem = build(timeline(40, 40), options, step=Sides(on_card=10.0, on_host=7.0))
    one = solve(problem, 30 * MIB)
    assert (len(one.chosen), one.seconds) == (1, 0.0)
    # Three of them would add six seconds; the other one adds two, and one of them hides beside it.
    more = solve(problem, 10 * MIB)
    assert 3 in more.chosen and len(more.chosen) == 2 and more.seconds == 2.0


def chain(num_blocks: int, offers: list[tuple[int, float]], scale: list[int] | None = None) -> Problem:
    """A chain of blocks, forwards and backwards; each may save some MiB from the end of its forward to the beginning of its backward."""
    sizes = scale or [100] * num_blocks
    events = [sum(sizes[: i + 1]) for i in range(num_blocks)]
    base = timeline(*(e * 2 for e in events), *(e * 2 for e in reversed(events)))
    options = [
        option(
            f"b.{i}",
            (i + 1, 2 * num_blocks - 1 - i, -saved * sizes[i] // 100),
            seconds=seconds * sizes[i] / 100,
            slots=(f"b.{i}",),
            equivalence_class="block" if scale is None else "",
        )
        for i in range(num_blocks)
        for saved, seconds in offers
    ]
    return build(base, options)


OFFERS = [(180, 3.0), (150, 1.9), (110, 1.0), (75, 0.55), (52, 0.35), (36, 0.2), (20, 0.1)]


@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
@pytest.mark.parametrize("trick", ["order_alike", "add_rows_when_broken"])
def test_tricks_change_no_answer(share: float, trick: str) -> None:
    problem = chain(9, OFFERS[:4])
    budget = int(problem.peak_bytes(()) * share)
    quick, plain = solve(problem, budget), solve(problem, budget, tricks=Tricks(**{trick: False}))
    assert quick.is_proven and plain.is_proven
    assert (quick.seconds, quick.peak_bytes) == pytest.approx((plain.seconds, plain.peak_bytes))


def test_a_hundred_blocks_that_are_alike_are_solved_to_the_end() -> None:
    problem = chain(96, OFFERS)
    found = solve(problem, problem.peak_bytes(()) // 2)
    assert found.is_proven and found.fits
    assert validate(problem, found, problem.peak_bytes(()) // 2) == []


def test_the_smallest_choice_is_not_called_the_fastest_where_the_solver_had_no_time_for_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = build(timeline(7, 7), [option("a", (0, 1, -3), seconds=2.0), option("b", (0, 2, -4), seconds=-1.0)])
    run = _Program.run
    monkeypatch.setattr(
        _Program, "run", lambda *args, **given: None if given.get("is_for_time") else run(*args, **given)
    )
    found = solve(problem, 5 * MIB)
    assert (found.fits, found.is_proven, found.bound_seconds) == (True, False, -1.0)
    nothing = solve(problem, 2 * MIB)
    assert (nothing.fits, nothing.is_proven) == (False, True)


def test_a_validator_sees_every_lie() -> None:
    problem = build(timeline(8), [option("a", (0, 1, -2), slots=("x",)), option("b", (0, 1, -3), slots=("x",))])
    honest = Solution(chosen=(0,), fits=True, seconds=1.0, peak_bytes=6 * MIB, bound_seconds=1.0, is_proven=True)
    assert validate(problem, honest, 6 * MIB) == []
    lies = {
        "more than one option": {"chosen": (0, 1), "seconds": 2.0, "peak_bytes": 3 * MIB},
        "the peak is": {"peak_bytes": 5 * MIB},
        "is said to": {"fits": False},
        "the options add": {"seconds": 0.5, "bound_seconds": 0.5},
        "distinct indices": {"chosen": (0, 0)},
        "the bound is above": {"bound_seconds": 2.0},
    }
    for words, lie in lies.items():
        assert any(words in fault for fault in validate(problem, dataclasses.replace(honest, **lie), 6 * MIB)), words


def test_a_problem_that_was_proven_is_not_solved_again(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = timeline(*range(1, 9))
    options = [option(f"layer.{i}", (i, 8, -1), seconds=1 + i) for i in range(6)]
    runs = []
    run = _Program.run
    monkeypatch.setattr(_Program, "run", lambda *args, **kwargs: runs.append(1) or run(*args, **kwargs))
    first = solve(build(moments, options), 5 * MIB)
    assert first.is_proven
    assert runs
    known = len(runs)
    assert solve(build(moments, options), 5 * MIB) == first
    assert len(runs) == known
    # Another budget, other seconds or other places are other problems.
    assert solve(build(moments, options), 6 * MIB) != first
    slower = [dataclasses.replace(each, seconds=each.seconds * 2) for each in options]
    assert solve(build(moments, slower), 5 * MIB).seconds == pytest.approx(2 * first.seconds)
    assert len(runs) > known
