"""Recordings that an earlier version of this project wrote are read, replayed, diagnosed and reported as they were: `tests/recordings`."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from tests.null.test_recordings_replay import recorded_totals

from tightfit.cli.main import run
from tightfit.diagnosis.histories import history_of_recording
from tightfit.recordings.read import read_recording
from tightfit.recordings.replayed import replay
from tightfit.units import MIB

FOLDER = Path(__file__).parents[1] / "recordings"
OWN = sorted(FOLDER.glob("*.pickle"))
# What the replay said when they were written, in bytes.
PEAKS = {"recorded": (249_591_296, 262_144_000), "estimated": (279_218_176, 329_252_864)}
# Of each step: the input (4 MiB), what the first layer and the activation return (12 MiB each), and a difference of the input's size.
KEPT_PER_STEP = 32 * MIB
SCRIPT = (FOLDER / "leaking.py").read_text(encoding="utf-8").splitlines()
by_name = pytest.mark.parametrize("path", OWN, ids=lambda path: path.stem)


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert run(arguments) == 0
    return json.loads(capsys.readouterr().out)


def test_they_are_small_and_all_are_tried() -> None:
    assert {path.stem for path in OWN} == set(PEAKS)
    assert sum(path.stat().st_size for path in OWN) < 300_000


@by_name
def test_a_replay_is_the_recorded_run_to_the_byte(path: Path) -> None:
    result = replay(read_recording(path))
    reserved, segments = recorded_totals(path)
    assert (result.peak_allocated_bytes, result.peak_reserved_bytes) == PEAKS[path.stem]
    assert (result.peak_reserved_bytes, result.segments) == (reserved, segments)
    assert result.agrees and result.num_moved_blocks == 0 and result.oom is None


@by_name
def test_a_history_adds_up_to_the_replay(path: Path) -> None:
    history = history_of_recording(read_recording(path))
    alive = history.alive_at(history.peak_event)
    assert int(history.blocks.block_bytes[alive].sum()) == int(history.allocated.max()) == PEAKS[path.stem][0]
    assert [span.name for span in history.spans if span.kind == "step"] == [f"step {n}" for n in range(1, 7)]


@by_name
def test_a_replay_with_less_memory_runs_out_of_it(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["replay", str(path), "--memory", "200MiB", "--json"]) == 1
    oom = json.loads(capsys.readouterr().out)["oom"]
    assert (
        oom["reserved_bytes"] <= 200 * MIB < oom["reserved_bytes"] + 20 * MIB
    )  # the segment that torch takes for a request of 1 to 10 MiB


@by_name
def test_the_doctor_names_the_line_and_what_it_keeps_of_each_step(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = answer(capsys, "doctor", str(path), "--json")
    ends = [step["end_allocated_bytes"] for step in found["steps"] if step["kind"] == "step"][:-1]
    assert all(after - before == pytest.approx(KEPT_PER_STEP, rel=0.05) for before, after in pairwise(ends))
    grown = sum(place["bytes_per_step"] for place in found["growth"])
    assert grown == pytest.approx(KEPT_PER_STEP, rel=0.05)
    lines = {SCRIPT[int(place["where"].removeprefix("leaking.py:")) - 1].strip() for place in found["growth"]}
    assert lines == {"batch = torch.randn(2048, 512, device=device)", "loss = (model(batch) - batch).square().mean()"}


@by_name
def test_the_doctor_says_which_statement_keeps_the_graphs_and_what_to_write(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(FOLDER)
    first, *_ = answer(capsys, "doctor", str(path), "--json", "--seconds", "0.1")["remedies"]
    assert first["where"] == "leaking.py:21" and SCRIPT[20].strip() == "total = total + loss"
    assert first["what"].startswith("`total = total + loss` retains the graph of every step: ")
    assert ".detach()" in first["what"] and ".item()" in first["what"]
    assert first["saves_bytes"] == pytest.approx(5 * KEPT_PER_STEP, rel=0.05)
    # Where the source is not there, the line that allocates is all that is known.
    monkeypatch.chdir(tmp_path)
    first, *_ = answer(capsys, "doctor", str(path), "--json", "--seconds", "0.1")["remedies"]
    assert first["where"] == "leaking.py:17"
    assert first["what"].startswith("if a sum or a list holds a loss or an output of every step, store `.item()`")


@by_name
def test_a_report_agrees_with_the_replay(path: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = answer(capsys, "report", str(path), "--format", "json")
    assert (found["peak_allocated_bytes"], found["peak_reserved_bytes"]) == PEAKS[path.stem]
    assert sum(found["at_peak"].values()) - found["at_peak"]["cache"] == PEAKS[path.stem][0]
    page = tmp_path / "page.html"
    assert run(["report", str(path), "-o", str(page)]) == 0
    assert "leaking.py:17" in page.read_text(encoding="utf-8")


def test_both_record_the_same_weights_and_states(capsys: pytest.CaptureFixture[str]) -> None:
    """What does not depend on kernels is the same on the host and on the virtual card, but for step counters of four bytes."""
    recorded, estimated = (answer(capsys, "doctor", str(path), "--json")["at_peak"] for path in reversed(OWN))
    assert recorded["parameters"] == estimated["parameters"]
    assert recorded["optimizer_state"] - estimated["optimizer_state"] == pytest.approx(0, abs=4 * 512)


def test_settings_are_searched_and_keep_what_is_live(capsys: pytest.CaptureFixture[str]) -> None:
    path = FOLDER / "recorded.pickle"
    tuned = answer(capsys, "replay", str(path), "--tune", "--json")["tune"]
    assert tuned["default"]["peak_reserved_bytes"] == PEAKS["recorded"][1]
    by_settings = {row["settings"]: row["peak_reserved_bytes"] for row in tuned["rows"]}
    assert tuned["live_bytes"] < by_settings["expandable_segments:True"] < PEAKS["recorded"][1]
