"""Changes of one option, taken together."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tightfit.planner.option import Change, merged

LENGTH = 12


@st.composite
def ranges_of_events(draw: st.DrawFn) -> Change:
    begin = draw(st.integers(0, LENGTH))
    return Change(begin=begin, end=draw(st.integers(begin, LENGTH)), num_bytes=draw(st.integers(-50, 50)))


def by_event(changes: list[Change]) -> np.ndarray:
    total = np.zeros(LENGTH, dtype=np.int64)
    for change in changes:
        total[change.begin : change.end] += change.num_bytes
    return total


@given(st.lists(ranges_of_events(), max_size=8))
def test_they_do_the_same_in_disjoint_stretches(changes: list[Change]) -> None:
    found = list(merged(changes))
    assert by_event(found).tolist() == by_event(changes).tolist()
    assert all(one.end <= other.begin for one, other in itertools.pairwise(found))
    assert all(change.num_bytes and change.begin < change.end for change in found)
