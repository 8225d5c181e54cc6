"""Two runs compared: what is the same is said to be the same, and a planted difference is found where it is."""

import io
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from tests.null.history_runs import CARD, FORWARD, LEAK, LOADER, NORM, Recorder, tape_of, training

from tightfit.diagnosis.alignment import align
from tightfit.diagnosis.diagnosed_run import subject_of_recording, subject_of_tape
from tightfit.diagnosis.difference import difference, without_other_folders
from tightfit.recordings.read import read_recording
from tightfit.reports.text.run_difference import DifferenceText
from tightfit.tape import Category, SpanKind
from tightfit.units import KIB, MIB


def recorded(path):
    return subject_of_recording(read_recording(path))


def text_of(found, width=120) -> str:
    out = io.StringIO()
    Console(file=out, width=width, highlight=False).print(DifferenceText(found))
    return out.getvalue()


@given(
    base=st.lists(st.integers(0, 50), min_size=30, max_size=80),
    inserted=st.lists(st.integers(100, 200), min_size=1, max_size=10),
    at=st.integers(0, 20),
)
@settings(max_examples=60, deadline=None)
def test_what_is_put_in_is_found_and_all_else_stays_aligned(base, inserted, at):
    longer = [*base[:at], *inserted, *base[at:]]
    aligned = align(base, longer)
    assert [piece for s in aligned for piece in base[s.a_begin : s.a_end]] == base
    assert [piece for s in aligned for piece in longer[s.b_begin : s.b_end]] == longer
    assert all(base[s.a_begin : s.a_end] == longer[s.b_begin : s.b_end] for s in aligned if s.is_same)
    (parting,) = [s for s in aligned if not s.is_same]
    assert (parting.a_begin, parting.a_end) == (at, at)
    assert longer[parting.b_begin : parting.b_end] == inserted


@given(a=st.lists(st.integers(0, 3), max_size=60), b=st.lists(st.integers(0, 3), max_size=60))
def test_any_two_sequences_are_covered_in_order(a, b):
    aligned = align(a, b)
    ends = [(s.a_end, s.b_end) for s in aligned]
    begins = [(s.a_begin, s.b_begin) for s in aligned]
    assert begins == [(0, 0), *ends[:-1]] if aligned else not (a or b)
    assert not aligned or ends[-1] == (len(a), len(b))
    assert all(s.a_end > s.a_begin or s.b_end > s.b_begin for s in aligned)


def test_sequences_that_have_nothing_in_common_part_at_once_and_for_good():
    (only,) = align(list(range(1000)), list(range(5000, 6000)))
    assert (only.is_same, only.a_end, only.b_end) == (False, 1000, 1000)


def test_a_run_is_no_different_from_itself(tmp_path):
    run = recorded(training(tmp_path / "run.pickle"))
    found = difference(run, run)
    assert (found.changes, found.divergences) == ((), ())
    assert [pair.a_allocations == pair.same_allocations for pair in found.steps] == [True] * 3
    assert "All allocations of these steps are equal" in text_of(found)


def test_a_leak_that_one_run_has_is_found_with_its_line(tmp_path):
    found = difference(
        recorded(training(tmp_path / "a.pickle")), recorded(training(tmp_path / "b.pickle", leak_bytes=3 * MIB))
    )
    change = next(change for change in found.changes if change.kind == "new")
    assert (change.b_where, change.a_bytes, change.category) == ("train.py:24", 0, "activations")
    parting = found.divergences[0]
    assert parting.a is None
    assert parting.b is not None
    assert (parting.b.where, parting.b.num_bytes) == ("train.py:24", 3 * MIB)
    assert found.matched_by == "lines"
    json.dumps(found.to_json())


def test_another_size_at_the_same_line_is_told_as_such(tmp_path):
    found = difference(
        recorded(training(tmp_path / "a.pickle", width=4 * MIB)),
        recorded(training(tmp_path / "b.pickle", width=8 * MIB)),
    )
    first = found.divergences[0]
    assert first.a is not None
    assert first.b is not None
    assert (first.a.where, first.b.where) == ("backward of MmBackward0", "backward of MmBackward0")
    assert (first.a.num_bytes, first.b.num_bytes) == (4 * MIB, 8 * MIB)
    state = next(change for change in found.changes if change.category == "optimizer_state")
    assert state.kind == "grown"


def estimate_and_recording(tmp_path, sizes, *, extra_bytes=0):
    """One program as a prediction, of other lines, and as a recording, which may ask for something more."""
    recorder = Recorder()
    numbers = [recorder.malloc(num_bytes, stack) for num_bytes, stack in zip(sizes, (NORM, FORWARD), strict=False)]
    if extra_bytes:
        recorder.malloc(extra_bytes, LEAK)
    numbers += [recorder.malloc(num_bytes, LOADER) for num_bytes in sizes[2:]]
    recorder.free(numbers[0])
    tape = tape_of(
        sizes,
        [*range(len(sizes)), -1],
        lines=[f"rebuilt.py:{10 + at}" for at in range(len(sizes))],
        categories=[Category.ACTIVATIONS] * len(sizes),
    )
    return subject_of_tape(tape, CARD), recorded(recorder.save(tmp_path / "run.pickle"))


SIZES = [3 * MIB, 5 * MIB, *[(20 + at) * MIB for at in range(8)]]


def test_a_prediction_and_a_recording_of_other_lines_are_matched_by_order(tmp_path):
    found = difference(*estimate_and_recording(tmp_path, SIZES))
    assert found.matched_by == "order"
    assert (found.changes, found.divergences) == ((), ())
    assert "All allocations" in text_of(found)


def test_the_first_place_where_prediction_and_reality_part(tmp_path):
    found = difference(*estimate_and_recording(tmp_path, SIZES, extra_bytes=700 * KIB))
    (parting,) = found.divergences
    assert parting.a is None
    assert parting.b is not None
    assert (parting.b.number, parting.b.where, parting.b.num_bytes) == (2, "train.py:24", 700 * KIB)
    (change,) = found.changes
    assert (change.kind, change.b_where) == ("new", "train.py:24")
    assert "allocation 2: 700.0 KiB for clone, train.py:24" in text_of(found)


def test_files_of_one_name_in_one_run_are_told_apart_by_their_folders():
    ours = ["/home/me/nets/blocks.py:2", "/home/me/utils/blocks.py:2", "/home/me/train.py:7", "backward of Mm"]
    theirs = ["C:\\run\\nets\\blocks.py:2", "C:\\run\\train.py:9"]
    shortened = without_other_folders(ours, theirs)
    assert [shortened(place) for place in ours] == [
        "nets/blocks.py:2",
        "utils/blocks.py:2",
        "train.py:7",
        "backward of Mm",
    ]
    assert [shortened(place) for place in theirs] == ["nets/blocks.py:2", "train.py:9"]
    categories = [Category.ACTIVATIONS] * 2
    a, b = (
        subject_of_tape(tape_of([4 * MIB, size], [0, 1, -2, -1], lines=ours[:2], categories=categories), CARD)
        for size in (4 * MIB, 16 * MIB)
    )
    (change,) = difference(a, b).changes
    assert (change.b_where, change.more_bytes) == (ours[1], 12 * MIB)


def test_steps_of_one_name_are_compared_and_others_counted_from_the_last():
    spans = [("step 1", SpanKind.STEP, 0, 2), ("step 2", SpanKind.STEP, 2, 4)]
    two = tape_of([MIB, 2 * MIB], [0, -1, 1, -2], spans=spans)
    later = tape_of([2 * MIB], [0, -1], spans=[("step 2", SpanKind.STEP, 0, 2)])
    other = tape_of([2 * MIB], [0, -1], spans=[("step 4", SpanKind.STEP, 0, 2)])
    for run, name in ((later, "step 2"), (other, "step 4")):
        (pair,) = difference(subject_of_tape(two, CARD), subject_of_tape(run, CARD)).steps
        assert (pair.a_step, pair.b_step, pair.same_allocations) == ("step 2", name, 1)


@pytest.mark.parametrize("width", [80, 120])
def test_the_page_fits_the_console(tmp_path, width):
    found = difference(
        recorded(training(tmp_path / "a.pickle")), recorded(training(tmp_path / "b.pickle", leak_bytes=3 * MIB))
    )
    assert max(map(len, text_of(found, width).splitlines())) <= width


def test_runs_that_ask_for_nothing_have_nothing_to_compare():
    empty = subject_of_tape(tape_of([], []), CARD)
    assert "No steps to compare" in text_of(difference(empty, empty))
