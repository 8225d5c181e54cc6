"""The benchmark on a card, without one: its rows follow their rule, every line of it runs on the virtual GPU, and its sums are right."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from benchmarks import side_by_side
from benchmarks.gpu import images, recordings, rows, table

from tightfit.recordings.read import read_recording
from tightfit.recordings.replayed import replay

ROOT = Path(__file__).parents[2]


def benchmark(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(out), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def virtual(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The folder of a run over one tiny row on the virtual GPU."""
    folder = tmp_path_factory.mktemp("gpu")
    done = benchmark(folder, "--virtual", "--tiny", "--match", "residual", "--recordings", "1")
    assert done.returncode == 0, done.stderr
    return folder, done


def results_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def test_there_are_enough_rows_and_each_is_another() -> None:
    everything = rows.all_rows()
    assert len(everything) >= 80
    assert len({row.name for row in everything}) == len(everything)
    assert len({row.family for row in everything[:11]}) == 11


@pytest.mark.parametrize("family", rows.FAMILIES, ids=lambda family: family.name)
def test_each_family_meets_every_precision_and_both_of_every_choice(family: rows.Family) -> None:
    own = [row for row in rows.all_rows() if row.family == family.name]
    assert {row.precision for row in own} == set(rows.PRECISIONS)
    assert {row.recompute for row in own} == {row.expandable_segments for row in own} == {True, False}
    assert len({row.optimizer for row in own}) == 8
    assert len({(str(row.model), row.batch_size) for row in own}) == 8
    assert ("math" in {row.attention for row in own}) == family.has_attention


def test_every_optimizer_and_kernel_occurs() -> None:
    everything = rows.all_rows()
    assert {row.optimizer for row in everything} == set(rows.OPTIMIZERS)
    assert {row.attention for row in everything} == {*rows.ATTENTION, ""}
    assert not any(row.attention == "flash" and row.precision == "fp32" for row in everything)


def test_shards_share_the_rows_out() -> None:
    everything = rows.all_rows()
    parts = [rows.shard(everything, f"{part}/3") for part in (1, 2, 3)]
    assert sorted(row.name for part in parts for row in part) == sorted(row.name for row in everything)
    with pytest.raises(ValueError, match="'3/2' is not a part such as 2/3"):
        rows.shard(everything, "3/2")


def test_a_dozen_to_record_is_one_of_every_family_and_one_more() -> None:
    names = rows.to_record(rows.all_rows(), 12)
    assert len(names) == 12
    assert {row.family for row in rows.all_rows() if row.name in names} == {family.name for family in rows.FAMILIES}


def test_what_runs_on_the_virtual_gpu_holds_what_was_predicted(
    virtual: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    (result,) = results_of(virtual[0])
    for figure in ("allocated", "reserved", "process"):
        assert table.error_of(result, figure) == 0.0
    # The benchmark waits for the GPU after each step, to time it; what was predicted is a loop that does not.
    assert table.error_of(result, "seconds") == pytest.approx(0.0, abs=0.02)
    assert result["limited"] == {"at_estimate": False}


@pytest.mark.slow
def test_nothing_is_needed_but_torch_numpy_and_transformers() -> None:
    """The machine that measures has neither the packages of the command line nor those of the reports."""
    code = (
        "import sys, benchmarks.gpu.__main__, benchmarks.gpu.measure, benchmarks.gpu.processes, benchmarks.gpu.tokens\n"
        "import tightfit.capture.child_process.capture_session, tightfit.capture.child_process.child, tightfit.recordings.write, tightfit.calibration.card_process\n"
        "print([name for name in ('cyclopts', 'tightfit.reports', 'tightfit.cli') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_table_and_the_summary_are_written(virtual: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = virtual
    lines = (folder / "table.csv").read_text().splitlines()
    assert any(line.startswith("# card: none: H200 simulated, nothing here is a measurement") for line in lines)
    header = next(line for line in lines if not line.startswith("#"))
    assert header.split(",") == list(table.COLUMNS)
    assert done.stdout == (folder / "summary.txt").read_text()
    assert "1 of 1 rows to do" in done.stderr


@pytest.mark.slow
def test_what_is_done_is_not_done_again(virtual: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    before = (virtual[0] / "results.jsonl").read_text()
    done = benchmark(virtual[0], "--predict-only", "--tiny", "--match", "residual")
    assert "0 of 1 rows to do" in done.stderr
    assert (virtual[0] / "results.jsonl").read_text() == before


def test_a_recording_is_small_and_replays_to_what_was_measured(
    virtual: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    (path,) = recordings.unpack(virtual[0] / "recordings.zip", tmp_path)
    recorded = next(result for result in results_of(virtual[0]) if result["name"].replace(" ", "_") in path.name)
    assert replay(read_recording(path)).peak_reserved_bytes == recorded["measured"]["reserved_bytes"]
    assert (virtual[0] / "recordings.zip").stat().st_size < 40_000


@pytest.mark.slow
def test_a_machine_without_a_card_is_told_so(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a card")
    done = benchmark(tmp_path / "out", "--tiny", "--match", "residual")
    assert done.returncode == 2
    assert done.stderr.startswith("no card to measure: ")
    assert done.stderr.count("\n") == 1


def test_the_most_that_the_driver_saw_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from benchmarks.gpu import measure

    seen = iter([100, 300, 200])

    class Driver:
        def __init__(self, nvml: object, pid: int) -> None:
            assert (nvml, pid) == ("library", os.getpid())

        def num_bytes(self, uuid: str) -> int:
            assert uuid == "abc"
            return next(seen, 50)

    monkeypatch.setattr(measure.Nvml, "open", lambda: "library")
    monkeypatch.setattr(measure, "ProcessMemory", Driver)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: types.SimpleNamespace(uuid="abc"))
    with measure.ProcessPeak() as peak:
        for _ in range(3):
            peak.sample()
    assert peak.num_bytes == 300


def test_the_child_answers_with_one_line_where_the_run_breaks() -> None:
    from benchmarks.gpu import measure

    class Pipe:
        sent: Any = None

        def send(self, found: Any) -> None:
            self.sent = found

        def close(self) -> None:
            pass

    pipe = Pipe()
    measure.answer(lambda: 1 / 0, pipe, {})
    assert pipe.sent == {"fault": "ZeroDivisionError: division by zero"}
    measure.answer(lambda size: {"bytes": size}, pipe, {"size": 3})
    assert pipe.sent == {"ok": {"bytes": 3}}


def a_result(name: str, *, measured: int, estimated: int, fails: bool = False, failed: bool = False) -> dict[str, Any]:
    row = rows.tiny_rows()[0]
    sizes = {f"{figure}_bytes": measured for figure in ("allocated", "reserved", "process")}
    guesses = {f"{figure}_bytes": estimated for figure in ("allocated", "reserved", "device")}
    band = {"reserved_low_bytes": estimated - 100, "reserved_high_bytes": estimated + 100}
    return {
        "name": name,
        "row": row.parameters() | {"expandable_segments": False},
        "measured": sizes | {"failed": failed, "seconds_per_step": 2.0, "num_retries": 0},
        "estimate": guesses | band | {"seconds_per_step": 1.0, "elapsed_seconds": 3.0},
        "limited": {"at_estimate": fails} | ({"at_upper_end": False} if fails else {}),
    }


def test_the_summary_counts_errors_failures_and_waste() -> None:
    results = [
        a_result("right", measured=1000, estimated=1000),
        a_result("above", measured=1000, estimated=1050),
        a_result("below", measured=1000, estimated=800, fails=True),
        a_result("out of memory", measured=1000, estimated=5000, failed=True),
    ]
    lines = table.summary(results).splitlines()
    reserved = next(line for line in lines if "reserved" in line).split()
    assert reserved[:3] == ["3", "reserved", "5.00"]  # of 0, 5 and 20 percent
    assert reserved[8:] == ["33", "%", "2.50", "%", "50", "%", "25", "%", "0", "%"]
    seconds = next(line for line in lines if "seconds" in line).split()
    assert seconds[:3] == ["3", "seconds", "50.00"]


def test_a_fault_is_told_in_the_table_and_below_the_summary() -> None:
    result = a_result("one", measured=1000, estimated=1000)
    result |= {"estimate": {"fault": "it, too, broke"}, "limited": {}}
    assert '"it, too, broke"' in table.to_csv([result], {"card": "none"})
    assert table.summary([result]).splitlines()[-1] == "not compared: one: it, too, broke"


def test_tools_stand_side_by_side_with_what_kept_them_from_answering() -> None:
    cases = [side_by_side.Case(name=name, measured_bytes=1000, commands={}) for name in ("one", "two")]
    answers = {
        (case.name, tool): side_by_side.Answer(num_bytes=None, seconds=1.0, fault="not installed")
        for case in cases
        for tool in (side_by_side.OURS, *side_by_side.TOOLS)
    }
    for case, said in zip(cases, (900, 1100), strict=True):
        answers[case.name, side_by_side.OURS] = side_by_side.Answer(num_bytes=said, seconds=2.0)
    lines = side_by_side.as_text(side_by_side.summarise(cases, answers)).splitlines()
    assert lines[2] == "| tightfit | 2 of 2 | 10.0 % | 10.0 % | 10.0 % | 50 % | 2.0 |  |"
    assert lines[3] == "| mem_tracker | 0 of 2 | - | - | - | - | - | not installed |"


@pytest.mark.slow
def test_the_formulas_of_other_tools_count_the_parameters_of_the_workload(
    virtual: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    results = tmp_path / "results.jsonl"
    results.write_text(json.dumps(results_of(virtual[0])[0]) + "\n")
    (case,) = side_by_side.gpu_cases(results, sys.executable)
    zero2 = side_by_side.ask(case, "deepspeed_zero2", 60)
    network = images.residual(depths=(1, 1), width=8, recompute=False)
    assert zero2.num_bytes == 20 * sum(weight.numel() for weight in network.parameters())
    assert side_by_side.ask(case, side_by_side.OURS, 60).num_bytes == case.measured_bytes
