"""Words in the picture of a plan: inside it, and where they cover least."""

from hypothesis import given
from hypothesis import strategies as st

from tightfit.reports.html.plan_labels import Box, Label, leader, placed

INSIDE = Box(left=72, top=0, right=860, bottom=328)


def words_at(x: float, y: float, *taken: Box, words: str = "the plan: 9.50 GiB") -> Label:
    return placed(words, x, y, inside=INSIDE, taken=taken)


def test_they_stand_beside_their_mark_towards_the_wider_side() -> None:
    assert words_at(100, 100) == Label(words="the plan: 9.50 GiB", x=102, y=105, anchor="begin")
    assert words_at(800, 100) == Label(words="the plan: 9.50 GiB", x=798, y=105, anchor="end")


def test_they_go_above_where_something_is_beside() -> None:
    assert words_at(100, 100, words_at(100, 100).box) == Label(words="the plan: 9.50 GiB", x=102, y=85, anchor="begin")


def test_they_go_to_the_other_side_where_something_is_above_and_below() -> None:
    taken = Box(left=400, top=0, right=860, bottom=328)
    assert words_at(390, 100, taken).anchor == "end"


def test_they_cover_nothing_where_there_is_room_farther_off() -> None:
    taken: list[Box] = []
    for _ in range(12):
        box = words_at(100, 100, *taken).box
        assert not any(box.overlap(other) for other in taken)
        taken.append(box)


def test_those_that_are_far_off_have_a_line_to_their_mark() -> None:
    near, far = words_at(100, 100), words_at(100, 100, Box(left=72, top=0, right=860, bottom=200))
    assert leader(near, 100, 100) is None
    found = leader(far, 100, 100)
    assert found is not None
    assert far.box.distance(*found) == 0


def test_they_cover_the_thinnest_line_where_all_places_are_taken() -> None:
    widths = {20: 6, 40: 6, 60: 6, 80: 6, 100: 6, 120: 2} | dict.fromkeys(range(140, 340, 20), 6)
    lines = [Box(left=0, top=y - width / 2, right=860, bottom=y + width / 2) for y, width in widths.items()]
    assert words_at(100, 100, *lines).y == 125


def test_boxes_that_touch_do_not_overlap() -> None:
    box = Box.around(10, 10, 5)
    assert box.overlap(Box.around(20, 10, 5)) == 0
    assert box.overlap(Box.around(15, 10, 5)) == 50


@given(x=st.floats(72, 836), y=st.floats(30, 328), length=st.integers(1, 45))
def test_they_are_inside_wherever_their_mark_is(x: float, y: float, length: int) -> None:
    box = words_at(x, y, words="w" * length).box
    assert INSIDE.left <= box.left <= box.right <= INSIDE.right
    assert INSIDE.top <= box.top <= box.bottom <= INSIDE.bottom
