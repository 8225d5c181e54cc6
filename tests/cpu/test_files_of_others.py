"""Folders and files of other users, in which a program may write: a trace takes that like any other writing, and leaves them as they are."""

import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tightfit.capture.processes.containment import namespaces
from tightfit.capture.processes.containment.closed_in import ClosedIn
from tightfit.capture.processes.containment.policy import DROPPED
from tightfit.capture.processes.containment.written import dropped_notes, written_files

USER, NOBODY = 54321, 65534

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="to be two users takes the superuser"
)


def as_user(user: int, does: Callable[[], bool]) -> bool:
    """What `does` returns, in a process of that user."""
    pid = os.fork()
    if pid == 0:
        code = 2
        try:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            code = int(does())
        except BaseException:  # noqa: BLE001 - the parent fails for it
            traceback.print_exc()
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, 1)
    return bool(code)


@pytest.fixture
def team(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that the superuser has made for all, with one of a user's own in it; `private` is for nobody else."""
    # Not below pytest's own, which no other user may enter.
    team = Path(tempfile.mkdtemp(prefix="team-", dir="/tmp"))
    for name, mode in (
        ("", 0o777),
        ("runs", 0o777),
        ("deep", 0o755),
        ("deep/runs", 0o777),
        ("own", 0o777),
        ("private", 0o755),
    ):
        (team / name).mkdir(exist_ok=True)
        (team / name).chmod(mode)
    for path, mode in ((team / "log.txt", 0o666), (team / "runs/log.txt", 0o666), (team / "runs/theirs.txt", 0o644)):
        path.write_text("old\n")
        path.chmod(mode)
    os.chown(team / "own", USER, USER)
    monkeypatch.setattr("tempfile.tempdir", "/tmp")
    yield team
    shutil.rmtree(team)


def writes(team: Path) -> None:
    """What a program writes there, and what it sees of it; what it may not write is refused as it is without a trace."""
    for folder in (team, team / "runs", team / "deep" / "runs", team / "own"):
        (folder / "new.txt").write_text("new")
        os.makedirs(folder / "run1" / "checkpoints")
        os.replace(folder / "new.txt", folder / "run1" / "moved.txt")
        assert sorted(os.listdir(folder / "run1")) == ["checkpoints", "moved.txt"]
    for folder in (team, team / "runs"):
        with open(folder / "log.txt", "a") as file:
            file.write("more\n")
        assert (folder / "log.txt").read_text() == "old\nmore\n"
    for refused in (team / "runs" / "theirs.txt", team / "private" / "new.txt"):
        with pytest.raises(OSError, match=r"Permission denied|Read-only"):
            refused.write_text("no")


def test_what_is_written_there_is_dropped(team: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/tmp")
    shared = team / "own" / "shared"

    def trace() -> bool:
        (shared / DROPPED).mkdir(parents=True)
        if not namespaces.found_space():
            return False
        pid = os.fork()
        if pid == 0:
            fields = {
                "policy": {"allow_writes": False, "allow_network": True},
                "shared": str(shared),
                "paths": [str(team)],
            }
            namespaces.enter_as(fields, str(team))
            ClosedIn(fields).begin()
            writes(team)
            return True
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
        return True

    if not as_user(USER, trace):
        pytest.skip("not with this kernel")
    assert (team / "log.txt").read_text() == (team / "runs/log.txt").read_text() == "old\n"
    assert sorted(p.name for p in team.iterdir()) == ["deep", "log.txt", "own", "private", "runs"]
    assert not list((team / "deep" / "runs").iterdir())
    files = ("log.txt", "runs/log.txt", "runs/run1/moved.txt", "deep/runs/run1/moved.txt")
    assert {str(team / name) for name in files} <= set(written_files(shared))
    assert "//" not in dropped_notes(shared)[0][1]


def test_nobody_has_no_overlays(team: Path) -> None:
    """Whom the files of all others seem to belong to."""
    assert not as_user(NOBODY, namespaces.are_possible)
