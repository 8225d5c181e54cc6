"""Closing in on the largest batch that fits, in few tries."""

import dataclasses
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tightfit.planner.largest_batch_size import BatchSize, BatchSizes, close_in, fastest
from tightfit.reports.text.batch_sizes import _table, _techniques, answer
from tightfit.units import MIB

MANY = 30


def row(size: int, seconds: float, *, fits: bool = True) -> BatchSize:
    return BatchSize(
        size=size,
        device_bytes=size,
        device_high_bytes=size,
        fits=fits,
        seconds_per_step=seconds,
        techniques=(),
        exact=True,
    )


@given(
    fixed=st.integers(-(1 << 36), 1 << 34), each=st.integers(1, 1 << 30), first=st.integers(1, 4096), known=st.just(0)
)
def test_on_a_line_the_answer_is_within_one(fixed: int, each: int, first: int, known: int) -> None:
    largest = max(0, -fixed // each)
    low, high = close_in(first, lambda size: fixed + each * size, known=known, max_tries=MANY, close_enough=0.0)
    assert low <= largest
    assert high is not None
    assert low == largest
    assert high == largest + 1


@given(each=st.integers(1, 1 << 26), first=st.integers(1, 64), jump=st.integers(0, 1 << 28))
def test_steps_in_the_line_do_not_lead_it_astray(each: int, first: int, jump: int) -> None:
    def excess(size: int) -> int:
        return each * size + jump * (size // 7) - (1 << 34)

    low, high = close_in(first, excess, max_tries=MANY, close_enough=0.01)
    assert low == 0 or excess(low) <= 0
    assert high is None or excess(high) > 0
    assert high is None or high > low


def test_few_tries_are_enough_for_a_line() -> None:
    tried: list[int] = []

    def excess(size: int) -> int:
        tried.append(size)
        return 100 * size - 52_345

    assert close_in(8, excess, max_tries=8, close_enough=0.02) == (520, 528)
    assert len(tried) <= 5


def test_a_size_next_to_one_that_fits_is_tried_only_where_an_end_is_needed() -> None:
    tried: list[int] = []

    def excess(size: int) -> int:
        tried.append(size)
        return {800: -5000, 1600: -200}.get(size, 10)

    ends = close_in(800, excess, known=400, max_tries=3, close_enough=0.1, needs_end=False)
    assert (ends, tried) == ((1600, None), [800, 1600])
    assert close_in(800, excess, known=400, max_tries=3, close_enough=0.1) == (1600, 1760)


def test_sizes_are_multiples_of_what_divides_the_first_one() -> None:
    """A mixup that wants pairs runs with every size that is tried, and the search does not end at an odd one."""
    line = lambda size: None if size % 2 else 100 * size - 29_500  # noqa: E731
    assert close_in(8, line, max_tries=8, close_enough=0.02) == (292, 296)
    # The size that an odd one begins with is as the program has it.
    assert close_in(7, lambda size: 100 * size - 29_500, max_tries=8, close_enough=0.02)[0] == 295


def test_a_size_that_does_not_run_is_an_end() -> None:
    low, high = close_in(4, lambda size: None if size > 20 else -1, max_tries=MANY, close_enough=0.0)
    assert (low, high) == (20, 21)


def test_no_size_beyond_the_data_set_is_tried() -> None:
    tried: list[int] = []

    def excess(size: int) -> int:
        tried.append(size)
        return -1

    # It is known from the first size on.
    ends = close_in(8, excess, max_tries=MANY, close_enough=0.02, largest=lambda: 100 if tried else None)
    assert ends == (100, None)
    assert max(tried) == 100


def test_a_flat_line_does_not_cost_a_try_for_each_size() -> None:
    """Segments come in steps: sizes next to each other hold the same, and a line through two of them leads nowhere."""
    tried: list[int] = []

    def excess(size: int) -> int:
        tried.append(size)
        return (30 * size // 250) * 250 - 3000 + (400 if size > 90 else 0)

    low, high = close_in(8, excess, max_tries=8, close_enough=0.02)
    assert high is not None and high - low <= 0.05 * high
    assert len(tried) <= 8


@pytest.mark.parametrize("largest", [100, 4_000, 40_180, 3_000_000])
def test_an_answer_far_from_the_first_size_is_as_close(largest: int) -> None:
    """Weights and segments of 2 MiB: a thousand examples more do not show beside them, as for narrow layers and scalars."""
    tried: list[int] = []

    def excess(size: int) -> int:
        tried.append(size)
        return max(0, 16 * MIB + size * 4096 // (2 * MIB) * 2 * MIB - 20 * MIB) - max(0, largest * 4096 - 4 * MIB) - 1

    low, high = close_in(8, excess, max_tries=8, close_enough=0.02)
    assert high is not None and high - low <= max(1, 0.02 * high) + 512
    assert len(tried) <= 14


def test_a_gap_that_is_wider_than_promised_is_said() -> None:
    small = row(300, 1.0)
    found = BatchSizes(
        target="t",
        device="d",
        parameter="n",
        budget_bytes=1,
        plain=small,
        plain_too_large=400,
        planned=None,
        planned_too_large=None,
        fastest=small,
        tried=(small,),
    )
    assert "(400 does not; sizes between the two, 25% of it, were not tried)" in answer(found)[0]
    assert "(306 does not)" in answer(dataclasses.replace(found, plain_too_large=306))[0]
    failed = dataclasses.replace(found, plain_too_large=306, failed={306: "batches are pairs"})
    assert "(306 does not run)" in answer(failed)[0]


def test_the_techniques_of_a_size_are_whole_in_a_narrow_terminal() -> None:
    names = ("optimizer_kernel", "tiled_tokens", "checkpointing", "nested_checkpointing", "allocator_settings")
    large = dataclasses.replace(row(1280, 2.0), techniques=names)
    found = BatchSizes(
        target="t",
        device="d",
        parameter="batch-size",
        budget_bytes=1,
        plain=None,
        plain_too_large=None,
        planned=large,
        planned_too_large=None,
        fastest=large,
        tried=(row(8, 1.0), large),
    )
    console = Console(file=io.StringIO(), width=80)
    for table in (_table(found, 80), _techniques(found, 80)):
        console.print(table)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in said
    assert all(name in said for name in names)


def test_nothing_fits() -> None:
    assert close_in(8, lambda size: size, max_tries=MANY, close_enough=0.0) == (0, 1)


def test_the_fastest_is_the_smallest_of_those_that_are_as_fast() -> None:
    rows = [row(1, 1.0), row(8, 4.0), row(16, 7.97), row(32, 9.0, fits=False)]
    found = fastest(rows)
    assert found is not None
    assert found.size == 8
    assert fastest([row(1, 1.0, fits=False)]) is None


def test_the_json_has_what_the_answer_has() -> None:
    small, large = row(2, 1.0), row(4, 1.5)
    found = BatchSizes(
        target="train.py",
        device="RTX 4090",
        parameter="batch_size",
        budget_bytes=1 << 30,
        plain=small,
        plain_too_large=3,
        planned=large,
        planned_too_large=None,
        fastest=large,
        tried=(small, large),
        failed={8: "there are 6 examples"},
    ).to_json()
    assert set(found) == {
        *("schema", "target", "device", "parameter", "budget_bytes", "fits", "plain", "plain_too_large"),
        *("planned", "planned_too_large", "fastest", "tried", "failed", "num_examples", "is_interrupted"),
    }
    assert found["fits"] is True
    assert found["failed"] == [{"size": 8, "why": "there are 6 examples"}]
    assert found["fastest"]["seconds_per_sample"] == 1.5 / 4
    assert [one["size"] for one in found["tried"]] == [2, 4]
