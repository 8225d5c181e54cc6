"""The examples under docs/ are what the commands say: of the real recordings where they stand beside the checkout."""

import io
import shlex
from pathlib import Path

import pytest
from rich.console import Console

from tightfit.cli.main import app
from tightfit.diagnosis.diagnose import diagnose
from tightfit.diagnosis.diagnosed_run import subject_of_recording
from tightfit.diagnosis.difference import difference
from tightfit.recordings.read import read_recording
from tightfit.reports.text.diagnosis import DiagnosisText
from tightfit.reports.text.run_difference import DifferenceText

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "docs/examples").glob("*.txt"))
RECORDINGS = ROOT.parent / "shared/data/snapshots"
SEARCHED = "allocator settings"
needs_recordings = pytest.mark.skipif(not RECORDINGS.is_dir(), reason="the recordings are not here")


def commands_of(example: Path) -> list[list[str]]:
    """The words of each command that an example begins with."""
    lines = example.read_text(encoding="utf-8").splitlines()
    return [shlex.split(line.removeprefix("$ ")) for line in lines if line.startswith("$ ")]


def subject(name: str):
    return subject_of_recording(read_recording(RECORDINGS / name))


def printed(report: object) -> str:
    out = io.StringIO()
    Console(file=out, width=120, highlight=False).print(report)
    return "".join(line.rstrip() + "\n" for line in out.getvalue().splitlines())


def test_there_are_examples_of_each_kind() -> None:
    assert {example.name.partition("_")[0] for example in EXAMPLES} == {"doctor", "diff", "tune"}
    assert len(EXAMPLES) == 12


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_their_commands_are_ones_that_the_program_takes(example: Path) -> None:
    for program, *arguments in commands_of(example):
        assert program == "tightfit"
        app.parse_args(arguments, exit_on_error=False, print_error=False)


@needs_recordings
@pytest.mark.parametrize("example", [e for e in EXAMPLES if e.stem.startswith("doctor")], ids=lambda path: path.stem)
def test_doctor_still_says_so(example: Path) -> None:
    """Up to the settings, whose search ends with the time."""
    ((_, _, name),) = commands_of(example)
    said = printed(DiagnosisText(diagnose(subject(name), seconds=0.2)))
    text = example.read_text(encoding="utf-8").partition("\n\n")[2]
    assert said.partition(SEARCHED)[0] == text.partition(SEARCHED)[0]


@needs_recordings
@pytest.mark.parametrize("example", [e for e in EXAMPLES if e.stem.startswith("diff")], ids=lambda path: path.stem)
def test_diff_still_says_so(example: Path) -> None:
    """Of two recordings; an estimate would have to be traced."""
    *estimates, (_, _, first, second) = commands_of(example)
    if estimates:
        return
    text = example.read_text(encoding="utf-8").partition("\n\n")[2]
    assert printed(DifferenceText(difference(subject(first), subject(second)))) == text
