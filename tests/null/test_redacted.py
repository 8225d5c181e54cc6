"""Reports that are sent to somebody name no home folder, of whatever system it was; all else in them stays."""

import dataclasses
import types
from pathlib import Path

import numpy as np
import pytest

from tightfit.reports.redacted import redacted, redacted_text


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/home/jane/work/train.py:41", "~/work/train.py:41"),
        ("/home/jane.doe-2/train.py:41 forward", "~/train.py:41 forward"),
        ("/Users/Jane Doe/train.py:41", "~/train.py:41"),
        ("C:\\Users\\Jane Doe\\train.py:41 main", "~\\train.py:41 main"),
        ("C:\\\\Users\\\\jane\\\\train.py", "~\\\\train.py"),
        ("/mnt/c/Users/jane/train.py", "~/train.py"),
        ("/gpfs/u/home/jane/train.py", "~/train.py"),
        ("/root/train.py:3", "~/train.py:3"),
        ("in /home/jane/a.py:3, called from /home/jane/b.py:4", "in ~/a.py:3, called from ~/b.py:4"),
        ("cannot read '/home/jane'", "cannot read '~'"),
        ("file:///home/jane/x.py", "file:~/x.py"),
        ("/mnt/users/jane/train.py:3", "~/train.py:3"),
        ("/gpfs/home01/jane/train.py", "~/train.py"),
        ("/u/jane/train.py:3 main", "~/train.py:3 main"),
        ("cannot read '/u/jane'", "cannot read '~'"),
        ("/nfs/homes/jane.doe/x.py", "~/x.py"),
        ("cannot read /nfs/homes/jane.doe", "cannot read ~"),
        ("/u/home/j/jane/train.py", "~/train.py"),
        ("/afs/cern.ch/user/j/jane/x.py", "~/x.py"),
        ("/global/u2/j/jane/x.py", "~/x.py"),
        ("/home/t/train.py:3", "~/train.py:3"),
    ],
)
def test_a_home_folder_is_a_tilde(path: str, shown: str) -> None:
    assert redacted_text(path) == shown


@pytest.mark.parametrize(
    "text",
    [
        "examples/train_gpt2.py:39",
        "src/home/page.py:3",
        "./home/jane.py",
        "/opt/models/root/x.py",
        "GPT.root.home.h.3",
        "/data/homes/x.py:1",
        "/srv/users/views.py:7",
        "/opt/models/u/x.py",
        "a home / Users / root",
        "",
    ],
)
def test_nothing_else_is_touched(text: str) -> None:
    assert redacted_text(text) == text


def test_the_home_of_this_process_wherever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/scratch/people/jane")
    assert (
        redacted_text("/scratch/people/jane/train.py, /scratch/people/janet/x.py")
        == "~/train.py, /scratch/people/janet/x.py"
    )


def test_the_home_that_the_system_knows_where_the_environment_names_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pwd = pytest.importorskip("pwd", reason="needs a list of users")
    real, link = tmp_path / "site" / "jane", tmp_path / "linked"
    real.mkdir(parents=True)
    link.symlink_to(real)
    monkeypatch.setattr(pwd, "getpwuid", lambda _: types.SimpleNamespace(pw_dir=str(link)))
    monkeypatch.setenv("HOME", "/scratch/people/job-17")
    said = redacted_text(f"{real}/a.py {link}/b.py /scratch/people/job-17/c.py /scratch/people/x.py")
    assert said == "~/a.py ~/b.py ~/c.py /scratch/people/x.py"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    label: str
    stacks: tuple[tuple[str, ...], ...]
    levels: np.ndarray
    versions: dict[str, object]


def test_every_text_of_nested_data() -> None:
    levels = np.arange(3)
    run = _Run(
        label="/home/jane/a.py",
        stacks=(("/home/jane/a.py:3 f", "x"),),
        levels=levels,
        versions={"/root/v": ["/Users/j/x", None, 3]},
    )
    found = redacted(run)
    assert (found.label, found.stacks, found.versions) == ("~/a.py", (("~/a.py:3 f", "x"),), {"~/v": ["~/x", None, 3]})
    assert found.levels is levels
    assert run.label == "/home/jane/a.py"
