"""The folder of a run on several ranks, and what its ranks find at standard input."""

import fcntl
import sys
import tempfile
from pathlib import Path

import pytest

from tightfit.errors import ApplyError
from tightfit.ranks.rank_input import refuse_input
from tightfit.ranks.run_folder import run_folder


def test_a_run_removes_what_killed_ones_have_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, alive, begins = (tmp_path / f"tightfit-ranks-{name}" for name in ("left", "alive", "begins"))
    for folder in (left, alive, begins):
        (folder / "rank1").mkdir(parents=True)
    for folder in (left, alive):
        (folder / "lock").touch()
    with (alive / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with run_folder() as (own, kept):
            assert sorted(tmp_path.iterdir()) == sorted([alive, begins, own])
            assert len(kept) == 1
            with run_folder() as (other, _):
                assert sorted(tmp_path.iterdir()) == sorted([alive, begins, own, other])
        assert sorted(tmp_path.iterdir()) == sorted([alive, begins])


@pytest.mark.parametrize(
    "read", [input, lambda: sys.stdin.read(1), lambda: list(sys.stdin), lambda: sys.stdin.buffer.read(1)]
)
def test_reading_input_on_a_rank_is_refused(read: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", sys.stdin)
    monkeypatch.setattr(sys, "__stdin__", sys.__stdin__)
    refuse_input(ApplyError)
    assert not sys.stdin.isatty()
    assert callable(read)
    with pytest.raises(ApplyError, match="it reads standard input"):
        read()
