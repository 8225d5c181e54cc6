"""`tightfit plan --ladder N`: plans that hold less and less, in files of their own, and the command that runs a script with them."""

import itertools
import json
from pathlib import Path

import pytest
from tests.cpu.test_plan_command import COMMAND, WORKLOAD

from tightfit.cli.main import run
from tightfit.planner.plan import Plan

# Many traces, of which each commit tries a half.
pytestmark = pytest.mark.by_turns(2)


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(WORKLOAD)


def test_each_plan_holds_less_than_the_one_before_and_has_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*COMMAND, "--ladder", "3", "--json", "--no-prove", "-o", "plan.json"]) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    assert 2 <= len(plans) <= 3
    for before, after in itertools.pairwise(plans):
        assert after["peak"]["reserved_bytes"] < 0.97 * before["peak"]["reserved_bytes"]
        assert after["seconds_per_step"] >= before["seconds_per_step"]
    saved = [Plan.load(tmp_path / f"plan-{number}.json") for number in range(1, len(plans) + 1)]
    assert [plan.run.peak.device_bytes for plan in saved] == [each["peak"]["device_bytes"] for each in plans]
    assert all(plan.fits and plan.choices for plan in saved)
    assert not (tmp_path / f"plan-{len(plans) + 1}.json").exists()


def test_a_script_is_answered_with_the_command_that_runs_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(f"{WORKLOAD}\nfor _ in zip(range(3), workload()):\n    pass\n")
    command = ["plan", "train.py", "--device", "RTX 4090", "--budget", "1000MiB", "--no-prove"]
    assert run([*command, "--ladder", "2", "-o", "p.json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("train.py on NVIDIA GeForce RTX 4090: 2 plans")
    assert lines[-1] == "tightfit run --guard --plan p-1.json --fallback p-2.json train.py"


def test_nothing_is_written_where_nothing_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [*COMMAND[:-1], "500MiB", "--no-prove", "--ladder", "2", "-o", "plan.json"]
    assert run(command) == 1
    assert "does not fit" in capsys.readouterr().out
    assert not list(tmp_path.glob("plan*.json"))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--ladder", "3"], "give -o plan.json"),
        (["--ladder", "1", "-o", "plan.json"], "two or more"),
        (["--ladder", "3", "-o", "plan.json", "--search", "num_rows"], "neither --search"),
    ],
)
def test_what_a_ladder_does_not_go_with_is_said(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*COMMAND, *words]) == 2
    assert told in capsys.readouterr().err
