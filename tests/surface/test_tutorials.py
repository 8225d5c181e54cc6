"""The report and the card of the tutorials work as they are printed. (The technique's is tried in `tests/conformance/test_new_technique.py`.)"""

import functools
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.null import test_devices_cards as checks
from tests.null.history_runs import tape_of

from tightfit.cli.main import run
from tightfit.devices import catalogue

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "how-it-works"


def printed(page: str, language: str) -> str:
    found = re.findall(rf"```{language}\n(.*?)```", (PAGES / page).read_text(encoding="utf-8"), re.DOTALL)
    return found[0]


def test_the_report_of_the_tutorial_is_a_form_like_any_other(tmp_path: Path) -> None:
    (tmp_path / "steps_as_csv.py").write_text(printed("new-report.md", "python"))
    information = tmp_path / "tutorial-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: tutorial\nVersion: 1.0\n")
    point = (
        printed("new-report.md", "toml")
        .replace('[project.entry-points."tightfit.reports"]', "[tightfit.reports]")
        .replace('"', "")
    )
    (information / "entry_points.txt").write_text(point)
    shutil.copy(ROOT / "tests/recordings/recorded.pickle", tmp_path / "run.pickle")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "tightfit", "report", "run.pickle", "--format", "csv"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split(",") for line in (tmp_path / "run.csv").read_text().splitlines()]
    assert [row[0] for row in rows] == ["span", "set-up", *(f"step {n}" for n in range(1, 7)), "after the last step"]
    assert max(int(row[2]) for row in rows[1:]) == 249_591_296


def test_a_form_that_nobody_brings_is_an_error_that_lists_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", "run.npz", "--format", "cvs"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "there are html, perfetto, json, text" in error


@pytest.fixture
def volta_with_one_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "catalogue"
    shutil.copytree(catalogue._FOLDER, folder)
    assert "V100S" not in (folder / "volta.toml").read_text(encoding="utf-8")
    with (folder / "volta.toml").open("a", encoding="utf-8") as file:
        file.write("\n" + printed("new-card.md", "toml"))
    monkeypatch.setattr(catalogue, "_FOLDER", folder)
    # With a cache of its own: other tests compare the cards of the catalogue by identity.
    monkeypatch.setattr(catalogue, "all_devices", functools.cache(catalogue.all_devices.__wrapped__))


@pytest.mark.usefixtures("volta_with_one_more")
def test_the_card_of_the_tutorial_is_a_card_like_any_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    card = catalogue.find("v100s")
    assert card.name == "Tesla V100S-PCIE-32GB"
    of_each_card = [
        check
        for check in vars(checks).values()
        if inspect.isfunction(check) and list(inspect.signature(check).parameters) == ["card"]
    ]
    assert len(of_each_card) > 6
    for check in of_each_card:
        check(card)
    tape_of([1 << 30], [0, -1]).save(tmp_path / "run.npz")
    assert run(["estimate", str(tmp_path / "run.npz"), "--device", "V100S", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["device"]["name"] == card.name
    assert run(["devices", "V100S"]) == 0
    assert "31.74 GiB" in capsys.readouterr().out
