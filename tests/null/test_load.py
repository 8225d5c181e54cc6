"""Requests that arrive, and what a simulated engine makes of them."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from tests.null.test_load_scheduler import costs, pages

from tightfit.errors import UsageError
from tightfit.serving.load.arrivals import Arrivals, drawn_arrivals, read_arrivals
from tightfit.serving.load.load_costs import FEMTOSECONDS
from tightfit.serving.load.load_summary import ServiceLevel
from tightfit.serving.load.scheduler import SchedulerLimits
from tightfit.serving.load.simulation import SHARE_WITHIN, LoadedEngine

NO_LIMITS = ServiceLevel()


def table(folder: Path, text: str) -> Path:
    path = folder / "trace.csv"
    path.write_text(text)
    return path


def test_a_trace_is_sorted_and_begins_at_its_first_request(tmp_path):
    found = read_arrivals(
        table(
            tmp_path,
            "TIMESTAMP,ContextTokens,GeneratedTokens\n"
            "2023-11-16 18:17:04.0319540,4808,10\n"
            "2023-11-16 18:17:03.9799600,3180,0\n"
            "\n"
            "2023-11-16 18:18:03.9799600,110,27\n",
        )
    )
    assert found.seconds == pytest.approx([0, 0.051994, 60], abs=1e-6)
    assert found.prompts.tolist() == [3180, 4808, 110]
    # A model answers with one token at least.
    assert found.answers.tolist() == [1, 10, 27]


def test_times_can_be_seconds_and_have_zones(tmp_path):
    assert read_arrivals(table(tmp_path, "time,prompt,answer\n5.5,1,1\n4,1,1\n")).seconds.tolist() == [0, 1.5]
    zoned = "arrival,input_tokens,output_tokens\n2024-05-10 00:00:00.5+00:00,1,1\n2024-05-10 02:00:01+02:00,1,1\n"
    assert read_arrivals(table(tmp_path, zoned)).seconds == pytest.approx([0, 0.5])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it has no header with columns for the time"),
        ("ContextTokens,GeneratedTokens\n1,2\n", "it has no header with columns for the time"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "it has no rows below its header"),
        ("time,prompt,answer\nsoon,1,2\n", "line 2: soon is no time"),
        ("time,prompt,answer\n0,1,2\n1\n", "line 3: ,  are no numbers of tokens"),
        ("time,prompt,answer\n0,0,2\n", "line 2: a prompt has at least one token"),
        ("time,prompt,answer\n0,5,-1\n", "line 2: a prompt has at least one token, an answer none or more"),
        ("time,prompt,answer\nnan,5,1\n", "line 2: nan is no time"),
    ],
)
def test_a_trace_that_is_none_is_one_clear_line(tmp_path, text, said):
    with pytest.raises(UsageError, match=said):
        read_arrivals(table(tmp_path, text))
    with pytest.raises(UsageError, match="there is no file"):
        read_arrivals(tmp_path / "none.csv")


def test_drawn_arrivals_have_their_rate_and_lengths_and_are_the_same_each_time():
    first, second = (drawn_arrivals([(10, 2), (30, 4)], 5.0, 4000, seed=7) for _ in range(2))
    assert first.rate == pytest.approx(5.0, rel=0.1)
    assert set(zip(first.prompts.tolist(), first.answers.tolist(), strict=True)) == {(10, 2), (30, 4)}
    assert np.array_equal(first.seconds, second.seconds)
    assert not drawn_arrivals([(10, 2)], float("inf"), 5).seconds.any()
    with pytest.raises(UsageError, match="--rate 0: give requests per second"):
        drawn_arrivals([(10, 2)], 0.0, 5)
    with pytest.raises(UsageError, match="--requests 0"):
        drawn_arrivals([(10, 2)], 1.0, 0)


def engine(**changes) -> LoadedEngine:
    # The costs are a thousand femtoseconds or so for a step, here as if they were milliseconds.
    of = costs(None)
    slow = dataclasses.replace(
        of,
        mixed=[each * FEMTOSECONDS // 10**6 for each in of.mixed],
        decode=[each * FEMTOSECONDS // 10**6 for each in of.decode],
        attention=(),
    )
    limits = SchedulerLimits(max_requests=8, max_tokens=64)
    fields = {"costs": slow, "pages": pages(900), "limits": limits, "max_model_len": 60}
    return LoadedEngine(**{**fields, **changes})


def arrivals(*rows: tuple[float, int, int]) -> Arrivals:
    seconds, prompts, answers = (np.array(part) for part in zip(*rows, strict=True))
    return Arrivals(seconds=seconds, prompts=prompts, answers=answers)


def test_requests_that_the_engine_would_refuse_or_cut_are_counted():
    found = engine().simulate(arrivals((0.0, 60, 5), (0.0, 50, 40), (0.0, 10, 5)), NO_LIMITS)
    assert (found.num_requests, found.num_refused, found.num_cut) == (3, 1, 1)
    # Ten tokens of the one that was cut, and five.
    assert found.answer_tokens_per_second * found.seconds == pytest.approx(15)


def test_times_of_a_request_alone_and_of_one_that_waits():
    found = engine(limits=SchedulerLimits(max_requests=1, max_tokens=64)).simulate(
        arrivals((0.0, 10, 3), (0.0, 10, 1)), NO_LIMITS
    )
    first, step = 1e-6 * (1000 + 370), 1e-6 * 911
    assert found.first_token.mean == pytest.approx((first + (first + 2 * step + first)) / 2)
    # Of requests with one token there is no time per token.
    assert found.each_token.p99 == pytest.approx(step)
    assert found.share_within is None
    assert found.largest_rate is None


def test_more_requests_per_second_wait_longer_and_fewer_are_within_the_limits():
    level = ServiceLevel(first_token=0.01, each_token=0.0012)
    drawn = drawn_arrivals([(20, 20)], 100.0, 150)
    found = engine().simulate(drawn, level)
    # The gaps of these arrivals, at other rates.
    others = [
        engine().simulate(dataclasses.replace(drawn, seconds=drawn.seconds * drawn.rate / rate), level)
        for rate in (0.9 * found.largest_rate, 1.3 * found.largest_rate)
    ]
    slower, faster = others
    assert slower.first_token.p90 < faster.first_token.p90
    assert slower.share_within >= SHARE_WITHIN > faster.share_within
    assert [each.largest_rate for each in others] == pytest.approx([found.largest_rate] * 2, rel=0.05)


def test_a_limit_that_one_request_alone_exceeds_has_no_rate():
    found = engine().simulate(drawn_arrivals([(20, 20)], 1.0, 20), ServiceLevel(each_token=1e-9))
    assert found.largest_rate == 0.0
    assert found.goodput == 0.0


def test_requests_that_are_refused_are_not_within_the_limits():
    level = ServiceLevel(first_token=10.0)
    some = engine().simulate(arrivals((0.0, 60, 5), (1.0, 10, 5), (2.0, 60, 5), (3.0, 10, 5)), level)
    assert some.share_within == 0.5
    assert some.goodput == pytest.approx(2 / some.seconds)
    # At no rate are 99 % of such requests served.
    assert some.largest_rate == 0.0
    assert some.rate == 1.0
    none = engine().simulate(arrivals((0.0, 60, 5), (1.0, 60, 5)), level)
    assert (none.share_within, none.largest_rate) == (0.0, 0.0)


@pytest.mark.parametrize("level", [ServiceLevel(each_token=10.0), ServiceLevel(first_token=0.05)])
def test_the_largest_rate_does_not_hang_on_how_many_requests_are_simulated(level):
    # All at once a batch is served within any limit of the time per token: what counts is that the queue ends.
    saturated = engine().simulate(drawn_arrivals([(20, 20)], float("inf"), 3000), NO_LIMITS)
    rates = [engine().simulate(drawn_arrivals([(20, 20)], 1.0, number), level).largest_rate for number in (3, 30, 3000)]
    assert max(rates) <= 1.02 * 3000 / saturated.seconds
    assert min(rates) >= 0.8 * max(rates)
