"""Prices, numbers of cards and what a whole training costs, as the user gives them and as they are answered."""

from pathlib import Path

import pytest

from tightfit.cli.arguments.counts import count_of, gpus_of
from tightfit.devices.catalogue import find
from tightfit.devices.nodes import node_of
from tightfit.errors import UsageError
from tightfit.layouts.answers.layout_costs import LayoutCost, price_of
from tightfit.reports.text.layouts import cost_in_words

CARD = find("h100")
NODE = node_of(CARD)
DAY = 86400.0


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("64", (64,)),
        ("8..64", (8, 16, 32, 64)),
        ("8..40", (8, 16, 32, 40)),
        ("3..3", (3,)),
        ("64, 8,24,8", (8, 24, 64)),
    ],
)
def test_numbers_of_gpus(text: str, numbers: tuple[int, ...]) -> None:
    assert gpus_of(text) == numbers


@pytest.mark.parametrize("text", ["", "0", "-8", "8..", "64..8", "0..8", "8-64", "8,,16", "eight", "8.5", "99999999"])
def test_what_is_no_number_of_gpus_is_said(text: str) -> None:
    with pytest.raises(UsageError, match="give the number of GPUs of all nodes together"):
        gpus_of(text)


def test_counts_with_a_letter() -> None:
    assert [count_of("--total", text) for text in ("300B", "1.5T", "20000", "2m", "3e9")] == [
        3e11,
        1.5e12,
        2e4,
        2e6,
        3e9,
    ]


@pytest.mark.parametrize("text", ["", "0", "many", "-3B", "3 bn", "1e999"])
def test_what_is_no_count_is_said(text: str) -> None:
    with pytest.raises(UsageError, match="give a count above 0"):
        count_of("--total", text)


def test_a_node_is_paid_for_as_a_whole(tmp_path: Path) -> None:
    file = tmp_path / "prices.toml"
    file.write_text('[per_node_hour]\n"dgx h100" = 24.0\n[per_gpu_hour]\n"NVIDIA H200" = 4\n')
    price = price_of(str(file), NODE, CARD.name)
    assert [price.per_hour(NODE, number) for number in (1, 8, 16)] == [24.0, 24.0, 48.0]
    h200 = find("h200")
    assert price_of(str(file), node_of(h200), h200.name).per_hour(node_of(h200), 16) == 64.0
    assert price_of("2.5", NODE, CARD.name).per_hour(NODE, 4) == 10.0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[per_node_hour]\np4d = 3", 'it has no price of DGX H100 nor of NVIDIA H100 80GB HBM3; add "DGX H100"'),
        ("[per_hour]\np4d = 3", "'per_hour' is not one of its tables"),
        ("per_node_hour = 3", "'per_node_hour' is not one of its tables"),
        ('[per_node_hour]\n"DGX H100" = "a lot"', "per_node_hour, DGX H100: a lot is no price"),
        ('[per_node_hour]\n"DGX H100" = -1', "-1 is no price"),
        ("[per_node_hour", "the file cannot be read"),
    ],
)
def test_wrong_prices_are_said(content: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "prices.toml"
    file.write_text(content)
    with pytest.raises(UsageError, match=said):
        price_of(str(file), NODE, CARD.name)


@pytest.mark.parametrize("text", ["cheap", "0", "-2", "nan", "inf", "missing.toml"])
def test_what_is_no_price_is_said(text: str) -> None:
    with pytest.raises(UsageError, match="--price"):
        price_of(text, NODE, CARD.name)


def test_days_and_money_of_a_whole_training() -> None:
    cost = LayoutCost(rate=1e6, price_per_hour=20.0, total=3e11, deadline_seconds=4 * DAY)
    assert cost.total_seconds == 3e5
    assert cost.total_price == pytest.approx(3e5 / 3600 * 20)
    assert cost.per_price == pytest.approx(1e6 * 180)
    assert cost.meets_deadline
    assert (
        cost_in_words(cost, "tokens") == "20.00 per hour, 180M tokens for each 1.00; 300B tokens in 3.5 days, for 1,667"
    )
    late = LayoutCost(rate=1e6, total=3e11, deadline_seconds=3 * DAY)
    assert not late.meets_deadline
    assert cost_in_words(late, "tokens") == "300B tokens in 3.5 days, after the deadline of 3.0 days"
