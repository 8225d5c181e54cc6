"""The accuracy benchmark's arithmetic, its reading of recordings and its commands; no torch, no estimate is run."""

import csv
import math
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

# The benchmarks lie beside the package, not in it.
sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.accuracy import every_nth
from benchmarks.accuracy_recordings import MIB, peak_allocated_bytes
from benchmarks.accuracy_rows import GROUPS, Row, timm_models
from benchmarks.accuracy_run import Answer, compare, estimate_command, run_all, run_json, slopes
from benchmarks.accuracy_table import (
    Comparison,
    percentile,
    report,
    slope,
    summarise,
    summarise_other,
    table,
    write_csv,
)

DATA = Path(__file__).parents[3] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the published measurements are not beside the checkout")
finite = st.floats(min_value=-1e9, max_value=1e9)


def row(**changes: Any) -> Row:
    fields: dict[str, Any] = {
        "group": "rtx",
        "name": "a model",
        "workload": "benchmarks/workloads/published_fp32.py:train_images",
        "parameters": {"model": "VGG16", "batch_size": 4},
        "device": "RTX 3060",
        "num_steps": 4,
        "figure": "reserved",
        "measured_bytes": 1000,
    }
    return Row(**(fields | changes))


def comparison(measured: float, estimated: float | None, **changes: Any) -> Comparison:
    fields: dict[str, Any] = {"group": "g", "name": "n", "figure": "reserved"}
    return Comparison(measured_bytes=measured, estimated_bytes=estimated, **(fields | changes))


def answer(**peak: int) -> Answer:
    steps = [{"peak_allocated_bytes": 700}, {"peak_allocated_bytes": 800}]
    return Answer(content={"peak": peak, "band": BAND, "steps": steps}, fault="", elapsed_seconds=1.5)


BAND = [
    {"cause": "CUDA context", "less_bytes": 30, "more_bytes": 60},
    {"cause": "allocation order", "less_bytes": 20, "more_bytes": 40},
]
PEAK = {
    "allocated_bytes": 900,
    "reserved_bytes": 1100,
    "device_bytes": 1300,
    "device_low_bytes": 1250,
    "device_high_bytes": 1400,
}


@given(st.lists(finite, min_size=1))
def test_percentiles_run_from_the_smallest_to_the_largest_value(values: list[float]) -> None:
    assert percentile(values, 0) == min(values)
    assert percentile(values, 1) == max(values)
    assert min(values) <= percentile(values, 0.5) <= max(values)


def test_a_percentile_lies_between_its_neighbours() -> None:
    assert percentile([1, 2, 3, 4], 0.5) == 2.5
    assert percentile([4, 1, 3, 2], 0.9) == pytest.approx(3.7)
    assert math.isnan(percentile([], 0.5))


@given(st.floats(-1e3, 1e3), st.floats(-1e3, 1e3), st.sets(st.integers(1, 500), min_size=2, max_size=6))
def test_the_slope_of_points_on_a_line_is_the_line_s(rise: float, start: float, places: set[int]) -> None:
    assert slope([(x, start + rise * x) for x in places]) == pytest.approx(rise, abs=1e-6)


def test_a_slope_needs_two_places() -> None:
    with pytest.raises(ValueError, match="two different x"):
        slope([(8, 1.0), (8, 2.0)])


def test_the_summary_counts_errors_bands_and_underestimates() -> None:
    rows = [
        comparison(100, 99, low_bytes=95, high_bytes=105),
        comparison(100, 102, low_bytes=101, high_bytes=106),
        comparison(100, 104),
    ]
    summary = summarise(rows)
    assert (summary.num_rows, summary.num_compared) == (3, 3)
    assert summary.median_error == pytest.approx(0.02)
    assert summary.share_inside == 0.5
    assert summary.median_band_width == pytest.approx(0.075)
    assert summary.share_under == pytest.approx(1 / 3)


def test_excluded_and_failed_rows_are_listed_but_enter_no_figure() -> None:
    rows = [
        comparison(100, 101),
        comparison(100, 900, excluded="ran out of memory"),
        comparison(100, None, fault="exit 3: no"),
    ]
    summary = summarise(rows)
    assert (summary.num_rows, summary.num_compared) == (3, 1)
    assert summary.ninety_fifth_error == pytest.approx(0.01)
    printed = report("rtx", rows)
    assert "ran out of memory" in printed
    assert "exit 3: no" in printed


def test_another_tool_is_judged_on_the_rows_that_count_and_that_it_has() -> None:
    rows = [
        comparison(100, 101, others={"xmem": 110}),
        comparison(100, 101),
        comparison(100, 101, excluded="full", others={"xmem": 900}),
    ]
    summary = summarise_other(rows, "xmem")
    assert summary.num_compared == 1
    assert summary.median_error == pytest.approx(0.1)


def test_a_summary_of_nothing_says_so_without_failing() -> None:
    assert "0 of 0 rows; |error| median -" in report("empty", [])


def test_the_table_shows_mebibytes_and_signed_errors() -> None:
    line = table([comparison(2 * MIB, 3 * MIB, low_bytes=MIB, high_bytes=4 * MIB)]).splitlines()[1]
    assert line.split() == ["n", "reserved", "2.0", "3.0", "+50.00", "%", "1.0", "to", "4.0", "yes", "-", "-"]


def test_a_baseline_is_shown_beside_the_figure_as_published() -> None:
    rows = [comparison(100 * MIB, 120 * MIB, baseline_bytes=20 * MIB, low_bytes=110 * MIB, high_bytes=130 * MIB)]
    assert rows[0].is_inside is False
    assert rows[0].with_baseline().is_inside is True
    assert rows[0].with_baseline().error == 0
    assert "20.0      +0.00 %" in table(rows)
    raw, whole = report("rtx", rows).splitlines()[-2:]
    assert "median 20.00 %" in raw
    assert whole.startswith("tightfit, baselines added to the measurements: 1 of 1 rows; |error| median 0.00 %")


def test_the_csv_file_says_where_it_comes_from(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rtx.csv"
    rows = [comparison(100, 101, others={"xmem": 110.0}), comparison(100, None, fault="no, not this")]
    write_csv(path, rows, {"command": "python -m benchmarks.accuracy rtx", "versions": "torch 2"})
    lines = path.read_text().splitlines()
    assert lines[:2] == ["# command: python -m benchmarks.accuracy rtx", "# versions: torch 2"]
    records = list(csv.DictReader(lines[2:]))
    assert records[0]["error"] == "0.010000"
    assert records[0]["xmem_bytes"] == "110"
    assert records[1]["estimated_bytes"] == ""
    assert records[1]["fault"] == "no, not this"


def test_the_command_is_what_a_user_would_type() -> None:
    words = " ".join(estimate_command(row(calibration="machine.toml"), "python"))
    assert words == (
        "python -m tightfit estimate benchmarks/workloads/published_fp32.py:train_images -p model=VGG16 "
        "-p batch_size=4 --steps 4 --device RTX 3060 --json --calibration machine.toml"
    )


def test_a_run_that_was_kept_is_not_traced_again(tmp_path: Path) -> None:
    first = estimate_command(row(), "python", tmp_path)
    kept = Path(first[first.index("--save-tape") + 1])
    assert kept.parent == tmp_path
    kept.touch()
    assert estimate_command(row(), "python", tmp_path)[3:5] == ["estimate", str(kept)]
    assert "--save-tape" in estimate_command(row(num_steps=2), "python", tmp_path)


@pytest.mark.parametrize(
    ("figure", "estimated", "band"),
    [
        ("device", 1300, (1250, 1400)),
        ("reserved", 1100, (1080, 1140)),
        ("allocated", 900, (None, None)),
        ("step_allocated", 800, (None, None)),
    ],
)
def test_each_figure_is_compared_with_its_own_peak(figure: str, estimated: int, band: tuple[Any, Any]) -> None:
    compared = compare(row(figure=figure), answer(**PEAK), {"mem_tracker": 7.0})
    assert compared.estimated_bytes == estimated
    assert (compared.low_bytes, compared.high_bytes) == band
    assert compared.others["mem_tracker"] == 7.0


def test_a_failed_estimate_is_a_row_with_its_fault() -> None:
    failed = Answer(content=None, fault="exit 3: could not capture", elapsed_seconds=2.0)
    compared = compare(row(), failed, {})
    assert compared.error is None
    assert not compared.counts
    assert compared.fault == "exit 3: could not capture"


def test_an_answer_is_read_when_the_workload_fits_and_when_it_does_not() -> None:
    for status in (0, 1):
        told = run_json([sys.executable, "-c", f"print('{{\"a\": 1}}'); raise SystemExit({status})"], 60)
        assert told.content == {"a": 1}
        assert told.fault == ""


def test_a_command_that_fails_is_reported_with_its_last_line() -> None:
    told = run_json([sys.executable, "-c", "import sys; sys.exit('first\\nlast words')"], 60)
    assert told.content is None
    assert told.fault.endswith("last words")


def test_a_command_that_takes_too_long_is_stopped() -> None:
    told = run_json([sys.executable, "-c", "import time; time.sleep(30)"], 0.5)
    assert told.content is None
    assert told.fault == "not done in 0 s"


def test_equal_commands_run_once(tmp_path: Path) -> None:
    note = tmp_path / "runs"
    command = (sys.executable, "-c", f"open({str(note)!r}, 'a').write('x'); print('{{}}')")
    answers = run_all([command, command], jobs=2, timeout_seconds=60)
    assert note.read_text() == "x"
    assert list(answers) == [command]


def test_a_sweep_is_compared_by_its_slopes() -> None:
    rows = [row(parameters={"model": "m", "batch_size": size}, measured_bytes=100 + 10 * size) for size in (8, 32)]
    levels = [comparison(one.measured_bytes, 50 + 12 * int(one.parameters["batch_size"])) for one in rows]
    (compared,) = slopes(rows, levels)
    assert compared.measured_bytes == pytest.approx(10)
    assert compared.estimated_bytes == pytest.approx(12)
    (missing,) = slopes(rows, [levels[0], comparison(420, None, fault="exit 3")])
    assert (missing.estimated_bytes, missing.fault) == (None, "exit 3")


def test_a_thinned_sweep_keeps_all_batches_of_a_model() -> None:
    sweep = [row(group="timm", parameters={"model": model, "batch_size": size}) for model in "abc" for size in (8, 16)]
    assert every_nth(sweep, 2) == [*sweep[:2], *sweep[4:]]
    plain = [row(name=str(place)) for place in range(5)]
    assert [one.name for one in every_nth(plain, 2)] == ["0", "2", "4"]


def test_models_of_the_sweep_are_chosen_by_name_alone() -> None:
    records = [{"timm_model": f"model{place:03}", "suspect_oom": "0"} for place in reversed(range(90))]
    records.append({"timm_model": "model000", "suspect_oom": "1"})
    chosen = timm_models(records)
    assert chosen[:3] == ["model001", "model003", "model005"]
    assert len(chosen) == 40


def recording(tmp_path: Path, segments: list[Any], events: list[Any]) -> Path:
    path = tmp_path / "recording.pickle"
    path.write_bytes(pickle.dumps({"segments": segments, "device_traces": [[], events]}))
    return path


def event(action: str, address: int, size: int) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size}


def test_a_block_whose_rest_is_too_small_counts_whole(tmp_path: Path) -> None:
    size, segment = 25 * MIB, 26 * MIB
    events = [event("segment_alloc", 0, segment), event("alloc", 0, size), event("free_completed", 0, size)]
    block = {"address": 0, "size": segment, "state": "inactive"}
    final = [{"address": 0, "total_size": segment, "blocks": [block]}]
    assert peak_allocated_bytes(recording(tmp_path, final, events)) == segment


def test_a_recording_that_begins_with_a_warm_cache_starts_from_what_was_alive(tmp_path: Path) -> None:
    blocks = [
        {"address": 0, "size": 4 * MIB, "state": "active_allocated"},
        {"address": 4 * MIB, "size": 16 * MIB, "state": "inactive"},
    ]
    final = [{"address": 0, "total_size": 20 * MIB, "blocks": blocks}]
    events = [
        event("alloc", 4 * MIB, 2 * MIB),
        event("alloc", 6 * MIB, 8 * MIB),
        event("free_completed", 4 * MIB, 2 * MIB),
        event("free_completed", 6 * MIB, 8 * MIB),
    ]
    assert peak_allocated_bytes(recording(tmp_path, final, events)) == 14 * MIB


def test_a_recording_that_names_a_class_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "evil.pickle"
    path.write_bytes(pickle.dumps(Path("/")))
    with pytest.raises(pickle.UnpicklingError, match="only plain data"):
        peak_allocated_bytes(path)


@needs_data
def test_every_published_row_names_a_workload_that_exists() -> None:
    root = Path(__file__).parents[2]
    counts = {}
    for group, load in GROUPS.items():
        rows = list(load(DATA))
        counts[group] = len(rows)
        for one in rows:
            file, _, function = one.workload.partition(":")
            assert f"def {function}(" in (root / file).read_text()
            assert one.measured_bytes > 100 * MIB
    assert counts == {"rtx": 46, "t4": 16, "a100": 18, "timm": 120, "recordings": 4}


@needs_data
def test_rows_near_a_full_card_are_excluded_with_a_reason() -> None:
    excluded = [one for one in GROUPS["rtx"](DATA) if one.excluded]
    assert {one.excluded for one in excluded} == {
        "ran out of memory",
        "over 90 % of the card: workspaces shrink",
        "width random",
    }
    assert len(excluded) < 46 / 4
