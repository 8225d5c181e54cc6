"""Files that users ask for: tried before the work, written whole or not at all, and never over what is read."""

import json
import os
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.null.test_sizes_of_commands import tape
from tests.plans import a_plan

from tightfit.cli.main import run
from tightfit.errors import OutputError, UsageError
from tightfit.output_files import check_outputs, write_text, writing

IS_ROOT = os.geteuid() == 0


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    tape().save("run.npz")
    return tmp_path


@contextmanager
def a_full_disk() -> Iterator[None]:
    """No file can be written beyond 100 bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def names() -> list[str]:
    return sorted(os.listdir())


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("nowhere/run.json", "there is no folder nowhere"),
        ("run.npz/run.json", "there is no folder run.npz"),
        ("folder", "this is a folder; name a file in it"),
        ("", "this is a folder; name a file in it"),
        ("n" * 300, "File name too long"),
        ("dangling", "there is no folder"),
        ("run.npz", "this file is an input, and would be overwritten"),
        ("also.npz", "this file is an input, and would be overwritten"),
        ("train.py", "this file is an input, and would be overwritten"),
    ],
)
def test_what_cannot_be_written_is_said_before_the_work(path: str, reason: str) -> None:
    Path("folder").mkdir()
    Path("train.py").write_text("")
    Path("also.npz").symlink_to("run.npz")
    Path("dangling").symlink_to("nowhere/at/all")
    before = names()
    with pytest.raises(UsageError, match=reason) as raised:
        check_outputs({"--output": path}, inputs=("run.npz", "train.py:workload", None, "gpt2"))
    assert str(raised.value).startswith(f"--output {Path(path)}: ")
    assert names() == before


def test_two_outputs_are_two_files() -> None:
    with pytest.raises(UsageError, match=r"--save-tape x: --save-recording writes the same file; name two"):
        check_outputs({"--save-tape": "x", "--save-recording": "./x"})
    check_outputs({"--save-tape": "/dev/null", "--save-recording": "/dev/null"})


@pytest.mark.skipif(IS_ROOT, reason="root may write everywhere")
def test_permissions_are_looked_at() -> None:
    Path("mine").write_text("kept")
    Path("mine").chmod(0o444)
    Path("closed").mkdir(mode=0o555)
    for path in ("mine", "closed/new"):
        with pytest.raises(UsageError, match=path):
            check_outputs({"-o": path})


def test_a_file_system_that_takes_no_file_is_found_out() -> None:
    with pytest.raises(UsageError, match=r"-o /proc/run\.json: "):
        check_outputs({"-o": "/proc/run.json"})


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else() -> None:
    Path("plan.json").write_text("old")
    before = names()
    with a_full_disk(), pytest.raises(OutputError, match=r"plan.json cannot be written: File too large"):
        a_plan().save("plan.json")

    def interrupted() -> None:
        with writing("plan.json") as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert Path("plan.json").read_text() == "old"
    assert names() == before


def test_a_link_stays_a_link_and_a_mode_stays() -> None:
    Path("real.txt").write_text("old")
    Path("real.txt").chmod(0o640)
    Path("link.txt").symlink_to("real.txt")
    write_text("link.txt", "new")
    assert Path("link.txt").is_symlink()
    assert Path("real.txt").read_text() == "new"
    assert stat.S_IMODE(os.stat("real.txt").st_mode) == 0o640
    old = os.umask(0o027)
    try:
        write_text("made.txt", "new")
    finally:
        os.umask(old)
    assert stat.S_IMODE(os.stat("made.txt").st_mode) == 0o640


def test_a_device_is_written_and_not_replaced() -> None:
    check_outputs({"-o": "/dev/null"}, inputs=("/dev/null",))
    write_text("/dev/null", "text")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    with pytest.raises(OutputError, match="/dev/full cannot be written: No space left on device"):
        write_text("/dev/full", "text")


def test_an_answer_that_cannot_be_saved_is_printed_all_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """One line says what failed, and the exit code is 3."""
    with a_full_disk():
        code = run(["estimate", "run.npz", "--device", "4090", "--save-recording", "run.pickle", "--json"])
    said = capsys.readouterr()
    assert (code, said.err) == (3, "tightfit: run.pickle cannot be written: File too large\n")
    assert json.loads(said.out)["fits"]
    assert names() == ["run.npz"]


@pytest.mark.parametrize(
    "command",
    [
        ["estimate", "run.npz", "--device", "4090", "--save-tape", "PATH"],
        ["estimate", "run.npz", "--device", "4090", "--save-recording", "PATH"],
        ["plan", "killed.py", "--device", "4090", "-o", "PATH"],
        ["record", "killed.py", "-o", "PATH"],
        ["report", "run.npz", "-o", "PATH"],
        ["report", "run.npz", "--format", "json", "-o", "PATH"],
        ["place", "run.csv", "--capacity", "9", "-o", "PATH"],
        ["calibrate", "--virtual", "-o", "PATH"],
    ],
)
def test_every_command_tries_its_files_first(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("killed.py").write_text("import os\nos.abort()\n")
    assert run([word.replace("PATH", "nowhere/x") for word in command]) == 2
    said = capsys.readouterr()
    assert said.err.endswith(" nowhere/x: there is no folder nowhere\n")
    assert (said.out, said.err.count("\n")) == ("", 1)
