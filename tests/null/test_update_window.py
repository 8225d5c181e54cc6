"""The order in which optimizer states come and leave, and the seconds that it takes: hand-made cases with known answers, and what holds of any."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tightfit.techniques.optimizer.at_host.streamed_updates import StreamedUpdate, streamed
from tightfit.techniques.optimizer.states.update_window import UpdateWindow


def moves(sizes: list[int], window_bytes: int) -> list[str]:
    """What a step does, in order: `+0` the states of the first parameter begin to come, `=0` it is updated, `-0` they begin to leave, `!0` they have."""
    window = UpdateWindow(sizes, window_bytes)
    sign = {"come": "+", "leave": "-", "left": "!"}
    found = [f"{sign[move.kind]}{move.index}" for move in window.begin()]
    for index in range(len(sizes)):
        found += [f"{sign[move.kind]}{move.index}" for move in window.before(index)]
        found.append(f"={index}")
        found += [f"{sign[move.kind]}{move.index}" for move in window.after(index)]
    found += [f"{sign[move.kind]}{move.index}" for move in window.end()]
    assert window.bytes_on_card == 0
    return found


def test_with_room_for_one_each_leaves_before_the_next_comes() -> None:
    assert " ".join(moves([8, 8, 8], 8)) == "+0 =0 -0 !0 +1 =1 -1 !1 +2 =2 -2 !2"


def test_with_room_for_two_one_comes_while_another_leaves() -> None:
    assert " ".join(moves([8, 8, 8, 8], 16)) == "+0 +1 =0 -0 =1 -1 !0 +2 =2 -2 !1 +3 =3 -3 !2 !3"


def test_with_room_for_three_one_comes_while_one_is_updated_and_another_leaves() -> None:
    assert " ".join(moves([8] * 5, 24)) == "+0 +1 +2 =0 -0 =1 -1 !0 +3 =2 -2 !1 +4 =3 -3 =4 -4 !2 !3 !4"


def test_small_states_do_not_wait_for_a_large_one_to_have_left_where_there_is_room() -> None:
    assert " ".join(moves([100, 1, 1, 1], 103)) == "+0 +1 +2 =0 -0 +3 =1 -1 =2 -2 =3 -3 !0 !1 !2 !3"


@given(st.lists(st.integers(1, 50), max_size=12), st.integers(1, 120))
def test_no_more_than_the_window_is_there_and_everything_comes_and_leaves_once(
    sizes: list[int], window_bytes: int
) -> None:
    found = moves(sizes, window_bytes)
    for index in range(len(sizes)):
        at = [found.index(f"{sign}{index}") for sign in "+=-!"]
        assert at == sorted(at) and len(set(at)) == 4
    assert len(found) == 4 * len(sizes)
    on_card: set[int] = set()
    for move in found:
        index = int(move[1:])
        on_card = on_card | {index} if move[0] == "+" else on_card - {index} if move[0] == "!" else on_card
        assert sum(sizes[each] for each in on_card) <= max(window_bytes, *(sizes[each] for each in on_card | {index}))


@pytest.mark.parametrize(
    ("window_bytes", "seconds"),
    [
        # In, update, out, one after the other.
        (10, 5 * (2 + 1 + 2)),
        # What leaves and what comes at once; the second one has come before the first leaves.
        (20, 2 + 5 * 1 + 4 * 2 + 2 - 1),
        # Both directions are always busy: the first comes and is updated, then as many leave.
        (30, 2 + 1 + 5 * 2),
    ],
)
def test_seconds_of_equal_parameters(window_bytes: int, seconds: float) -> None:
    updates = [StreamedUpdate(state_bytes=10, num_copies=2, seconds=1.0, result_bytes=7) for _ in range(5)]
    found = streamed(updates, window_bytes, lambda num_bytes, _: num_bytes / 5)
    assert found.sides.on_card == pytest.approx(seconds)
    assert found.peak_bytes == window_bytes + 7


def test_copies_hide_behind_the_computation_between_the_updates() -> None:
    updates = [StreamedUpdate(state_bytes=10, num_copies=1, seconds=1.0, seconds_before=5.0) for _ in range(4)]
    found = streamed(updates, 30, lambda num_bytes, _: num_bytes / 5, seconds_after=3.0)
    assert found.sides.on_card == pytest.approx(4 * (5 + 1) + 3)
