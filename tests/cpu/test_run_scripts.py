"""`tightfit run` on training scripts that know nothing of it: within a budget that the plain script exceeds, with the plain script's losses.

Three scripts are planned and run here with TIGHTFIT_SLOW_TESTS=1; `python -m benchmarks.run_scripts --csv docs/run.csv` does all of them, and the table is looked at.
"""

import csv
from pathlib import Path

import pytest
from benchmarks.run_scripts import ARGUMENTS, Bench, Row, read, row_of

ROOT = Path(__file__).parents[2]
TABLE = read(ROOT / "docs" / "run.csv")
# What is chosen for these keeps losses up to the order of sums in float32, over a few steps of training.
CLOSE = 1e-4
HERE = ("vit_amp", "nanogpt_train", "run_clm")


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.slow) for name in HERE])
def row(request: pytest.FixtureRequest) -> Row:
    return row_of(request.param, TABLE[request.param].budget_mib)


def is_within(row: Row) -> bool:
    return row.planned_mib <= row.budget_mib < row.plain_high_mib


def test_the_planned_script_fits_where_the_plain_one_does_not_and_trains_the_same(row: Row) -> None:
    assert row.status == "ok"
    assert is_within(row)
    assert row.num_losses >= 3
    assert row.largest_difference is not None
    assert row.largest_difference <= CLOSE


def test_the_table_is_of_scripts_that_exist_and_all_have_arguments_here() -> None:
    assert {path.stem for path in (ROOT / "tests" / "scripts").glob("*.py")} == set(ARGUMENTS)
    assert set(HERE) <= set(TABLE) <= set(ARGUMENTS)


@pytest.mark.parametrize("script", TABLE)
def test_no_row_of_the_table_trains_otherwise(script: str) -> None:
    found = TABLE[script]
    assert found.status in ("ok", "no plan fits")
    if found.status == "ok":
        assert is_within(found)
        assert found.largest_difference is not None
        assert found.largest_difference <= CLOSE


def test_the_table_is_as_it_is_written() -> None:
    with (ROOT / "docs" / "run.csv").open(newline="") as file:
        assert [line["script"] for line in csv.DictReader(file)] == sorted(TABLE)


def test_a_script_that_cannot_be_planned_is_an_error_in_its_row(tmp_path: Path) -> None:
    bench = Bench(script="gan", folder=tmp_path)
    assert "the budget is 0" in bench.plan(0)["error"]
