"""Ranks end together, whichever ends first and whatever the others are doing. Each is a small program without torch."""

import os
import signal
import sys
from pathlib import Path

import pytest

from tightfit.ranks import rank_launch

# Would go on for ever, and is not to outlive a test that fails.
FOR_EVER = "import time; time.sleep(300)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); open('deaf', 'w').close(); time.sleep(300)"


def programs(*ranks: str) -> list[str]:
    """A command that does for each rank what its program says."""
    return [sys.executable, "-c", f"import os; exec({ranks!r}[int(os.environ['RANK'])])"]


def ended(monkeypatch: pytest.MonkeyPatch, *ranks: str) -> tuple[int, list[str]]:
    monkeypatch.setattr(rank_launch, "_GRACE_SECONDS", 0.5)
    monkeypatch.setattr(rank_launch, "_KILL_SECONDS", 0.5)
    said: list[str] = []
    return rank_launch.run_ranks(programs(*ranks), len(ranks), said.append, on_cards=False), said


KILLED = f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})"


def test_the_first_rank_is_at_work_when_another_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ended(monkeypatch, FOR_EVER, FOR_EVER, KILLED) == (
        137,
        ["rank 2 was killed (SIGKILL); the other ranks were ended with it"],
    )


def test_another_rank_is_at_work_when_the_first_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ended(monkeypatch, KILLED, FOR_EVER) == (
        137,
        ["rank 0 was killed (SIGKILL); the other ranks were ended with it"],
    )


def test_an_error_of_a_later_rank_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = "import sys; print('first', file=sys.stderr); sys.exit('the disk is full')"
    assert ended(monkeypatch, FOR_EVER, failing) == (
        1,
        ["rank 1 ended with exit code 1: the disk is full; the other ranks were ended with it"],
    )


def test_an_error_of_the_first_rank_is_its_own_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ended(monkeypatch, "import sys; sys.exit(3)", FOR_EVER) == (3, [])


def test_ranks_that_do_not_end_when_told_are_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    failing = "import os, sys, time\nwhile not os.path.exists('deaf'): time.sleep(0.01)\nsys.exit(4)"
    code, said = ended(monkeypatch, DEAF, failing)
    assert (code, len(said)) == (4, 1)


def test_ranks_that_end_well_do_not_end_each_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    slow = "import os, time\nwhile not os.path.exists('quick'): time.sleep(0.01)\ntime.sleep(0.2); open('slow', 'w').close()"
    assert ended(monkeypatch, slow, "open('quick', 'w').close()") == (0, [])
    assert sorted(os.listdir(tmp_path)) == ["quick", "slow"]


@pytest.mark.parametrize("is_through", [True, False])
def test_a_rank_that_is_aborted_when_all_are_through_has_ended_well(
    monkeypatch: pytest.MonkeyPatch, is_through: bool
) -> None:
    """As one is whose threads let go of tensors while Python ends."""
    path = f"os.path.join(os.environ[{rank_launch.FOLDER!r}], {rank_launch.ENDED.format(1)!r})"
    noted = f"os.write(os.open({path}, os.O_CREAT | os.O_WRONLY), b'1'[:{is_through:d}])"
    aborted = f"import os; {noted}; os.kill(os.getpid(), {int(signal.SIGABRT)})"
    code, said = ended(monkeypatch, "", aborted)
    assert (code == 0) == (not said) == is_through
