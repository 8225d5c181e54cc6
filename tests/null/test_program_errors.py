"""An exception of the user's program in one line: what helps where something was not found."""

import sys
from pathlib import Path

import pytest

from tightfit.errors.program_errors import one_line


def test_a_file_beside_the_program_is_said_to_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my project").mkdir()
    (tmp_path / "my project" / "size.txt").write_text("64")
    monkeypatch.chdir(tmp_path)
    label = "my project/train.py"
    line = one_line(label, FileNotFoundError(2, "No such file or directory", "size.txt"))
    assert line.endswith("which runs in the folder that you are in: cd 'my project' first")
    # One that is nowhere, and one with its whole path, are the program's own matter.
    for name in ("other.txt", str(tmp_path / "size.txt")):
        assert "cd " not in one_line(label, FileNotFoundError(2, "No such file or directory", name))


def test_a_module_that_is_missing_is_missing_in_the_python_that_runs() -> None:
    line = one_line("train.py", ModuleNotFoundError("No module named 'datasets'", name="datasets"))
    assert line == (
        "train.py raised ModuleNotFoundError: No module named 'datasets'; "
        f"programs run with {sys.executable}: install it there"
    )
    assert "install it there" not in one_line("train.py", ImportError("cannot import name 'x'"))
