"""What is tried by turns is all tried over some commits, and the same part by each run of one."""

import types
from typing import Any

import pytest
from tests.sampled import in_turn

SHAS = ("5f1c0e8d2b7a4c9e", "5f1c0e8d2b7a4c9f", "5f1c0e8d2b7a4ca0")


def _items(test: str, count: int, num_turns: int | None) -> list[Any]:
    marker = None if num_turns is None else types.SimpleNamespace(args=(num_turns,))
    return [
        types.SimpleNamespace(nodeid=f"{test}[{number}]", get_closest_marker=lambda _: marker)
        for number in range(count)
    ]


@pytest.mark.parametrize("num_turns", [2, 3])
def test_parts_of_each_test_make_the_whole_over_as_many_turns(num_turns: int) -> None:
    items = [*_items("test_one", 7, num_turns), *_items("test_other", 6, num_turns)]
    parts = [in_turn(items, sha) for sha in SHAS[:num_turns]]
    assert parts == [in_turn(items, sha) for sha in SHAS[:num_turns]]
    assert sorted(each.nodeid for part in parts for each in part) == sorted(each.nodeid for each in items)
    for part in parts:
        assert {each.nodeid.partition("[")[0] for each in part} == {"test_one", "test_other"}


def test_what_has_no_turns_and_everything_without_a_commit_is_tried() -> None:
    items = [*_items("test_one", 4, 2), *_items("test_other", 3, None)]
    assert in_turn(items, None) == in_turn(items, "") == items
    assert [each for each in in_turn(items, SHAS[0]) if each in items[4:]] == items[4:]
