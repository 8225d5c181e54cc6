"""Words in the picture of a plan: inside it, and where they cover least."""

from hypothesis import given
from hypothesis import strategies as st

from tightfit.reports.html.plan_labels import Box, Label, placed

INSIDE = Box(left=72, top=0, right=860, bottom=328)


def words_at(x: float, y: float, *taken: Box, words: str = "the plan: 9.50 GiB") -> Label:
    return placed(words, x, y, inside=INSIDE, taken=taken)


def test_they_stand_above_their_mark_towards_the_wider_side() -> None:
    assert words_at(100, 100) == Label(words="the plan: 9.50 GiB", x=102, y=85, anchor="begin")
    assert words_at(800, 100) == Label(words="the plan: 9.50 GiB", x=798, y=85, anchor="end")


def test_they_go_below_where_something_is_above() -> None:
    assert words_at(100, 100, words_at(100, 100).box) == Label(words="the plan: 9.50 GiB", x=102, y=125, anchor="begin")


def test_they_go_to_the_other_side_where_something_is_above_and_below() -> None:
    taken = Box(left=400, top=0, right=860, bottom=328)
    assert words_at(390, 100, taken).anchor == "end"


def test_they_go_a_line_further_where_both_are_taken() -> None:
    above, below = words_at(100, 100).box, words_at(100, 140).box
    assert words_at(100, 100, above, below).y == 65


def test_they_cover_the_thinnest_line_where_all_places_are_taken() -> None:
    widths = {60: 6, 80: 4, 120: 2, 140: 6, 160: 6, 180: 6}
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
