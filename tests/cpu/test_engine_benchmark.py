"""A sample of `python -m benchmarks.engine exactness`, `growth` and `faults`; the whole tables are in docs/engine."""

import csv
from pathlib import Path

import pytest
import torch
from benchmarks.engine import faults
from benchmarks.engine.architectures import ARCHITECTURES
from benchmarks.engine.exactness import compared
from benchmarks.engine.growth import grown
from benchmarks.engine.ways import TIERS, WAYS

# Many traces, of which each commit tries a half.
pytestmark = pytest.mark.by_turns(2)

DOCS = Path(__file__).parents[2] / "docs" / "engine"
PAIRS = [(way, tier) for way in WAYS for tier in TIERS]


@pytest.fixture(autouse=True)
def one_thread() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("way", "tier"), PAIRS)
def test_a_few_steps_are_the_same_to_the_bit(way: str, tier: str) -> None:
    name = list(ARCHITECTURES)[PAIRS.index((way, tier)) % len(ARCHITECTURES)]
    assert compared(name, way, tier, 2).is_exact


def test_more_steps_take_nothing_more_and_leave_nothing() -> None:
    assert grown("all", "disk", 20).is_constant


@pytest.mark.parametrize(("way", "tier"), PAIRS)
def test_after_faults_all_is_as_it_was_or_refused(way: str, tier: str) -> None:
    place = faults.num_calls(way, tier) // 2
    found = [
        faults.after_fault(way, tier, faults.failing_at(place, faults.FaultError)),
        faults.after_fault(way, tier, faults.threads_gone()),
        faults.after_hook(way, tier, "backward"),
        faults.after_fork(way, tier),
    ]
    assert not [outcome for outcome in found if faults.is_wrong(outcome)]


def test_the_tables_have_no_wrong_row() -> None:
    def rows(name: str) -> list[dict[str, str]]:
        with (DOCS / name).open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    exact, grew, failed = rows("exactness.csv"), rows("growth.csv"), rows("faults.csv")
    assert {(row["model"], row["moved"], row["tier"]) for row in exact} == {
        (m, *pair) for m in ARCHITECTURES for pair in PAIRS
    }
    assert all(
        row["num_steps"] == row["same_losses"] == row["same_gradients"] == row["same_weights"] == "50" for row in exact
    )
    assert all(row["same_end"] == "True" and int(row["moved_bytes"]) for row in exact)
    assert [(row["moved"], row["tier"], row["num_steps"]) for row in grew] == [(*pair, "1000") for pair in PAIRS]
    assert all(row["constant"] == row["nothing_left"] == "True" for row in grew)
    assert {(row["moved"], row["tier"]) for row in failed} == set(PAIRS)
    assert not [row for row in failed if faults.is_wrong(row["outcome"])]
