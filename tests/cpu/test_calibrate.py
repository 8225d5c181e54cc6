"""`tightfit calibrate` on a simulated card finds the figures that the card was given, and its file is one that estimates can read."""

import json
import math
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tests.forked_python import forked_python

from tightfit.calibration.measured_card import thread_counts
from tightfit.calibration.simulated_instruments import figures_of
from tightfit.cost.efficiency import efficiency_of
from tightfit.devices.calibration import Calibration
from tightfit.devices.calibration_file import to_toml
from tightfit.devices.catalogue import find

# Many traces, of which each commit tries a half.
pytestmark = pytest.mark.by_turns(2)

COUNT_ON_THE_VIRTUAL_GPU = """
import json, os, sys
from tightfit.capture.child_process.capture_session import CaptureSession
session = CaptureSession("H200", sys.maxsize, by_yield=True)
rows = []
with session.gpu:
    from tightfit.calibration.microbenchmarks import works
    for work in works():
        run = work.make()
        run()
        before = session.recorder.num_operators
        run()
        columns = {key: values[before:] for key, values in session.recorder.operators.items()}
        names = [session.recorder.strings.texts[name] for name in columns["name"]]
        moved = [r + w for r, w in zip(columns["bytes_read"], columns["bytes_written"])]
        rows.append([work.name, work.kind, work.flops, work.num_bytes, names, columns["flops"], moved])
        del run
print(json.dumps(rows), flush=True)
os._exit(0)  # torch is patched throughout, and is not torn down
"""

MEASURE_WITH_THE_INSTRUMENTS_OF_A_CARD = """
import dataclasses, json, os, sys
from pathlib import Path
from tightfit.capture.child_process.capture_session import CaptureSession
session = CaptureSession("H200", sys.maxsize, by_yield=True)
with session.gpu:
    from tightfit.calibration import measured_card as card, card_process as child, simulated_instruments as simulated
    # One thread: hundreds of copies, which run on the host here, outlast an update whose clock is real.
    card.sizes_of_this_machine = lambda: dataclasses.replace(simulated.SIZES, num_threads=(1,))
    instruments = card.CardInstruments(child._card)
    print(json.dumps(child._measured(instruments, Path(sys.argv[1]), driver=instruments.driver)), flush=True)
os._exit(0)  # torch is patched throughout, and is not torn down
"""


def tightfit(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = str(Path(sys.executable).with_name("tightfit"))
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The file that `--virtual` wrote for an A100, and the JSON that it printed."""
    path = tmp_path_factory.mktemp("calibrate") / "a100.toml"
    answer = tightfit("calibrate", "--virtual", "--device", "A100 80GB", "-o", str(path), "--json")
    assert answer.returncode == 0, answer.stderr
    assert answer.stderr == f"wrote {path} (simulated: estimates refuse it)\n"
    return path, json.loads(answer.stdout)


@pytest.fixture(scope="module")
def counted() -> list[list[Any]]:
    """What the virtual GPU puts on a tape for each operator that is measured."""
    done = forked_python("-c", COUNT_ON_THE_VIRTUAL_GPU, check=True)
    return json.loads(done.stdout)


def test_the_measurements_find_the_efficiencies_that_the_simulated_card_has(
    calibrated: tuple[Path, dict[str, Any]],
) -> None:
    card, found = find("A100 80GB"), Calibration.load(calibrated[0])
    there = efficiency_of(card, figures_of(card))
    measured = efficiency_of(card, found)
    for kind in (
        "normalisation",
        "normalisation_backward",
        "elementwise",
        "reduction",
        "embedding",
        "copy",
        "optimizer",
    ):
        assert measured.of_bandwidth[kind] == pytest.approx(there.of_bandwidth[kind], rel=0.02), kind
    for dtype in ("bfloat16", "float16", "tf32", "float32"):
        for kind in ("matmul", "convolution", *(("attention",) if "float1" in dtype else ())):
            assert measured.of_flops[kind, dtype] == pytest.approx(there.of_flops[kind, dtype], rel=0.03), (kind, dtype)
    for name in ("launch_seconds", "ramp_seconds", "issue_seconds"):
        assert getattr(measured, name) == pytest.approx(getattr(there, name), rel=0.05)


def test_the_measurements_find_the_memory_that_the_simulated_card_takes(
    calibrated: tuple[Path, dict[str, Any]],
) -> None:
    card, found = find("A100 80GB"), Calibration.load(calibrated[0])
    assert found.context_parts == figures_of(card).context_parts
    assert found.context is not None
    assert found.context.low_bytes == found.context_parts["init"]
    assert found.context.num_bytes == found.context.high_bytes == sum(found.context_parts.values())
    assert found.cublas_bytes == 8_519_680


def test_the_measurements_find_the_link_the_host_and_the_disk(calibrated: tuple[Path, dict[str, Any]]) -> None:
    there, found = figures_of(find("A100 80GB")), Calibration.load(calibrated[0])
    assert found.overlap == pytest.approx(dict(there.overlap), rel=0.03)
    for key in ("to_card_both_ways_bytes_per_second", "from_card_pinned_bytes_per_second"):
        assert found.link[key] == pytest.approx(there.link[key], rel=0.03)
    assert found.host["register_seconds_per_gib"] == pytest.approx(0.3, rel=0.03)
    assert found.host["adamw_threads"] == [1.0, 2.0]
    assert found.host["adamw_parameters_per_second"] == pytest.approx([1e9, 2e9], rel=0.03)
    assert found.host["adamw_beside_copies_parameters_per_second"] == pytest.approx([0.8e9, 1.6e9], rel=0.03)
    if found.disk:  # the folder of this test may be in memory, which takes no O_DIRECT
        assert found.disk["read_bytes_per_second"] == pytest.approx(2.2e9, rel=0.03)
    assert len(set(map(len, found.allocation.values()))) == 1


def test_every_figure_has_its_spread(calibrated: tuple[Path, dict[str, Any]]) -> None:
    rows = calibrated[1]["measured"]
    assert len(rows) > 90
    assert len({row["name"] for row in rows}) == len(rows)
    for row in rows:
        assert row["low"] <= row["median"] <= row["high"]
        assert math.isfinite(row["median"])
        assert row["num_samples"] > 1 or row["unit"] == "bytes"
    assert sum(row["predicted"] is not None for row in rows) > 70


def test_the_file_says_that_it_is_simulated_and_estimates_refuse_it(calibrated: tuple[Path, dict[str, Any]]) -> None:
    path, answer = calibrated
    content = tomllib.loads(path.read_text())
    assert (content["schema"], content["virtual"], answer["virtual"]) == (2, True, True)
    workload = str(Path(__file__).parents[1] / "gpu" / "workloads.py:perceptron")
    refused = tightfit("estimate", workload, "--device", "A100 80GB", "--calibration", str(path))
    assert refused.returncode == 2
    assert "made with --virtual: its figures are simulated, not measured" in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_the_content_survives_the_file(calibrated: tuple[Path, dict[str, Any]]) -> None:
    content = tomllib.loads(calibrated[0].read_text())
    assert tomllib.loads(to_toml(content)) == content


@pytest.mark.slow
def test_the_instruments_of_a_card_run_every_measurement_too(tmp_path: Path) -> None:
    """Events and clocks are read as on a card; on the virtual GPU an event takes a millisecond, so the figures mean nothing."""
    done = forked_python("-c", MEASURE_WITH_THE_INSTRUMENTS_OF_A_CARD, str(tmp_path), check=True)
    content = json.loads(done.stdout)
    found = Calibration.from_content(content, where="what was measured")
    assert not found.is_virtual
    assert {"context", "workspaces", "efficiency", "seconds", "link", "overlap", "allocation", "host"} <= content.keys()
    assert done.stderr.count("measuring ") == 8


def test_threads_are_counted_in_powers_of_two_up_to_all_cores() -> None:
    assert thread_counts(1) == (1,)
    assert thread_counts(12) == (1, 2, 4, 8, 12)
    assert thread_counts(192) == (1, 2, 4, 8, 16, 32, 64)


def test_a_machine_without_a_card_is_told_in_one_line() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a card")
    answer = tightfit("calibrate")
    assert answer.returncode == 2
    assert answer.stdout == ""
    assert answer.stderr.startswith("tightfit: there is no NVIDIA GPU to measure: ")
    assert answer.stderr.count("\n") == 1


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    answer = tightfit("calibrate", "--virtual", "-o", str(tmp_path / "absent" / "card.toml"))
    assert (answer.returncode, answer.stdout) == (2, "")
    assert f"there is no folder {tmp_path / 'absent'}" in answer.stderr


def test_flops_are_counted_as_on_a_tape(counted: list[list[Any]]) -> None:
    for name, _, flops, _, _, traced, _ in counted:
        if flops:
            assert sum(traced) == pytest.approx(flops, rel=1e-6), name


def test_bytes_are_counted_as_on_a_tape(counted: list[list[Any]]) -> None:
    """A tape reads a lookup's whole table, and counts the scratch output of attention, neither of which costs time."""
    for name, kind, _, num_bytes, names, _, moved in counted:
        if kind not in ("embedding", "attention", "convolution"):
            assert sum(moved) == pytest.approx(num_bytes, rel=0.01), (name, names)
