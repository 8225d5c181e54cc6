"""What no line of the program asked for is named once, by its operator; and files that are no recording by what they are."""

from tightfit.recordings.file_kinds import kind_of
from tightfit.reports.blocks_by_site import line_and_function


def test_a_block_without_a_line_is_named_by_its_operator_once() -> None:
    assert line_and_function(("aten.clone",)) == ("clone", "")
    assert line_and_function(("train.py:7 aten.clone",)) == ("train.py:7", "clone")


def test_a_trace_that_is_given_for_a_recording_is_known() -> None:
    assert "a trace that --save-tape wrote" in (kind_of(b"PK\x03\x04-\x00\x00\x00\x08\x00head.npy\x01") or "")
    assert "a ZIP archive" in (kind_of(b"PK\x03\x04archive/data.pkl") or "")
