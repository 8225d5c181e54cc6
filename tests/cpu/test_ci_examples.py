"""The checks for continuous integration in examples/ci run as they are, and fail where a step does not fit."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
from tests.forked_python import forked_python

from tightfit.cli.main import run

FOLDER = Path(__file__).parents[2] / "examples" / "ci"
TOO_LARGE = """

def test_too_large(assert_fits):
    assert_fits(WORKLOAD, "RTX 4060", gib=8, parameters=["batch_size=4096"])
"""


@pytest.fixture(autouse=True)
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(FOLDER, tmp_path / "ci", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(tmp_path / "ci")


@pytest.mark.slow
def test_the_fixture_passes_what_fits_and_says_what_holds_most_of_what_does_not() -> None:
    with open("test_memory.py", "a") as file:
        file.write(TOO_LARGE)
    answer = forked_python("-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", ".")
    assert answer.returncode == 1, answer.stdout + answer.stderr
    assert "1 failed, 2 passed" in answer.stdout
    assert re.search(r"\d+\.\d\d GiB of 7\.75 GiB\n", answer.stdout)
    assert "activations" in answer.stdout
    assert "Traceback" not in answer.stdout


def test_the_commands_of_the_workflow(capsys: pytest.CaptureFixture[str]) -> None:
    lines = re.findall(r"- run: (tightfit .*)", Path("memory.yml").read_text())
    assert len(lines) == 2
    for line in lines:
        words = shlex.split(line.partition(" > ")[0])
        assert run(words[1:]) == 0, capsys.readouterr().err
