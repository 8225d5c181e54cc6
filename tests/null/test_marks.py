"""Marks in a recording: what is written is what is read, and what is not marks is one clear line."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tightfit.errors import RecordingError
from tightfit.recordings.marks import Marks
from tightfit.simulate.history import CATEGORIES, UNKNOWN, HistorySpan
from tightfit.tape import Assumption

numbers = st.integers(min_value=0, max_value=1 << 50)
ascending = st.lists(numbers, unique=True, max_size=9).map(sorted)


@st.composite
def some_marks(draw: st.DrawFn) -> Marks:
    modules = draw(st.lists(st.text(max_size=9), min_size=1, max_size=4))
    events, addresses, inside = draw(ascending), draw(ascending), draw(ascending)
    spans = draw(st.lists(st.tuples(numbers, numbers), max_size=3))
    return Marks(
        origin=draw(st.sampled_from(["estimate", "card", "host"])),
        trace=draw(st.integers(0, 7)),
        device=draw(st.text(max_size=20)),
        capacity_bytes=draw(st.none() | numbers),
        context_bytes=draw(st.none() | numbers),
        spans=tuple(HistorySpan(name="step 1", kind="step", begin=min(pair), end=max(pair)) for pair in spans),
        category_events=column(events),
        categories=column([draw(st.integers(0, UNKNOWN)) for _ in events]),
        start_addresses=column(addresses),
        start_categories=column([draw(st.integers(0, UNKNOWN)) for _ in addresses]),
        module_events=column(inside),
        module_values=column([draw(st.integers(0, len(modules) - 1)) for _ in inside]),
        modules=tuple(modules),
        assumptions=(Assumption(where="a", what="b"),),
    )


def column(values: list[int]) -> Any:
    return np.array(values, dtype=np.int64)


def example() -> Marks:
    return Marks(
        origin="estimate",
        trace=0,
        device="a card",
        capacity_bytes=1 << 30,
        context_bytes=None,
        spans=(HistorySpan(name="step 1", kind="step", begin=0, end=9),),
        category_events=column([1, 4]),
        categories=column([0, 2]),
        start_addresses=column([512]),
        start_categories=column([1]),
        module_events=column([4]),
        module_values=column([0]),
        modules=("layer",),
        assumptions=(),
    )


@given(some_marks())
def test_what_is_written_is_what_is_read(marks: Marks) -> None:
    read = Marks.from_plain(marks.to_plain())
    for field in dataclasses.fields(Marks):
        assert np.array_equal(getattr(read, field.name), getattr(marks, field.name)), field.name


def test_each_event_has_the_category_and_module_that_is_known_of_it() -> None:
    marks = example()
    assert marks.category_of_events(6).tolist() == [UNKNOWN, 0, UNKNOWN, UNKNOWN, 2, UNKNOWN]
    assert marks.module_of_events(6).tolist() == [-1, -1, -1, -1, 0, -1]
    assert marks.category_of_events(2).tolist() == [UNKNOWN, 0]  # a trace that was cut


def test_a_category_of_a_later_version_is_unknown() -> None:
    plain = example().to_plain()
    plain["categories"]["names"] = ["parameters", "gradients", "something new"]
    assert Marks.from_plain(plain).categories.tolist() == [CATEGORIES.index("parameters"), UNKNOWN]


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("schema",), 2, "schema 2, and this version reads 1"),
        (("origin",), "a dream", "'origin' is none of estimate, card, host"),
        (("origin",), [], "'origin' is none of"),
        (("device",), None, "'device' is no text"),
        (("capacity_bytes",), -1, "'capacity_bytes' is no whole number"),
        (("trace",), True, "'trace' is no whole number"),
        (("spans",), [["a", "step", 3, 2]], "a span ends before it begins"),
        (("spans",), [["a", ["step"], 3, 4]], "a span is not"),
        (("categories",), [], "'categories' is no dict"),
        (("categories", "events"), [4, 1], "'events' do not ascend"),
        (("categories", "events"), [1], "not of one length"),
        (("categories", "values"), [0, 99], "no index of a name"),
        (("modules", "names"), [], "no index of a name"),
        (("modules", "events"), [1 << 63], "no whole number"),
        (("assumptions",), [["where"]], "an assumption is not"),
    ],
)
def test_what_is_no_marks_is_one_clear_line(path: tuple[str, ...], value: object, says: str) -> None:
    plain = example().to_plain()
    table = plain
    for key in path[:-1]:
        table = table[key]
    table[path[-1]] = value
    with pytest.raises(RecordingError, match=r"^the recording's own marks \(its key 'tightfit'\)") as raised:
        Marks.from_plain(plain)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)
