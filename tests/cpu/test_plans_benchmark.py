"""The benchmark of plans: tapes that serve again, rows that can be read again, faults that are named, combinations that are all there."""

import dataclasses
from pathlib import Path

import pytest
from benchmarks.plans import grid, table
from benchmarks.plans.baselines import outermost_repeated
from benchmarks.plans.bench import StoredRuns, bench_of
from benchmarks.plans.headlines import activations
from benchmarks.plans.optimality import ENUMERATED, against_all_promises, combinations, deep, part_of
from benchmarks.plans.workloads import WORKLOADS, Workload

from tightfit.fit.searching.allowed import Allowed
from tightfit.fit.searching.search import Search
from tightfit.planner.solve import solve

TINY = Workload(
    name="tiny",
    source=":small",
    batch_size=4,
    device="RTX 4090",
    settings={"num_blocks": 2, "width": 256, "num_tokens": 512},
)
PLAN = grid.Row(
    workload="tiny",
    device="RTX 4090",
    kind="plan",
    name="90%",
    budget_bytes=100,
    fits=True,
    device_bytes=95,
    high_bytes=100,
    seconds=1.0,
    plain_bytes=111,
    plain_seconds=0.9,
    baseline="",
    baseline_seconds=0.0,
    choices="2 checkpointing",
    num_traced=2,
    elapsed_seconds=3.5,
    wrong="",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tapes")


@pytest.fixture(scope="module")
def runs(folder: Path) -> StoredRuns:
    made = bench_of(TINY, folder)
    made.run_with(())
    return made


def test_a_tape_that_was_kept_serves_again(runs: StoredRuns, folder: Path):
    again = bench_of(TINY, folder)
    assert again.run_with(()).estimate == runs.run_with(()).estimate
    assert again.num_traced == 0
    assert bench_of(TINY, folder, 2)._place(frozenset()) != again._place(frozenset())


def test_a_search_takes_kept_tapes(runs: StoredRuns):
    plain = runs.run_with(())
    assert Search(runs, 0, Allowed()).run().best.high_bytes <= plain.high_bytes
    assert runs.num_traced > 1


def test_the_solver_misses_no_combination_of_a_traced_model(runs: StoredRuns):
    for comparison in against_all_promises(runs):
        assert comparison.above == pytest.approx(0.0, abs=1e-4)


def test_every_block_twice_is_every_block_once(runs: StoredRuns):
    options = Search(runs, 0, Allowed()).candidates.variant(runs.run_with(())).problem.options
    assert [option.where for option in outermost_repeated(options)] == ["_Small.blocks.0", "_Small.blocks.1"]


def test_activations_are_what_is_neither_parameter_nor_gradient_nor_state(runs: StoredRuns):
    trial = runs.run_with(())
    held = trial.estimate.at_peak
    assert activations(trial.tape) >= held["activations"] + held["temporaries"]
    assert activations(trial.tape) < trial.estimate.peak.allocated_bytes


def test_combinations_are_all_that_are_free_of_conflicts():
    problem = deep(3, 2, is_regular=True)
    assert len(list(combinations(problem))) == 3**2  # the last block waits for nothing, so it has no options
    assert len(list(combinations(part_of(problem, ENUMERATED)))) == 1


def test_a_deep_model_holds_less_the_smaller_its_budget():
    problem = deep(12, 4, is_regular=False)
    most = problem.peak_bytes(())
    found = [solve(problem, int(share * most)) for share in (0.9, 0.8, 0.7)]
    assert all(solution.fits and solution.is_proven for solution in found)
    assert sorted(found, key=lambda solution: solution.seconds) == found


def test_a_table_can_be_read_again(tmp_path: Path):
    rows = [PLAN, dataclasses.replace(PLAN, kind="baseline", fits=False, wrong="does not run")]
    table.save(tmp_path / "plans.csv", rows)
    assert table.load(tmp_path / "plans.csv") == rows
    assert table.load(tmp_path / "other.csv") == []
    assert table.verdict(rows) == "1 workloads, 1 budgets: 1 as asked, 0 not"
    assert "2 checkpointing" in list(table.lines(rows))[1]


def test_a_smaller_budget_that_holds_more_or_is_faster_is_a_fault():
    assert list(grid._faults(PLAN, PLAN)) == []
    worse = dataclasses.replace(PLAN, budget_bytes=120, high_bytes=120, seconds=0.5)
    assert list(grid._faults(worse, PLAN)) == [
        "holds more than with a larger budget",
        "50.0% faster than with a larger budget",
    ]


def test_a_plan_that_a_simple_remedy_beats_is_a_fault():
    beaten = dataclasses.replace(PLAN, baseline="half the batch", baseline_seconds=0.8)
    assert list(grid._faults(beaten, None)) == ["25.0% slower than half the batch"]
    assert list(grid._faults(dataclasses.replace(PLAN, high_bytes=101), None)) == ["said to fit and does not"]


def test_workloads_have_names_of_their_own():
    assert len({workload.name for workload in WORKLOADS}) == len(WORKLOADS) >= 12
