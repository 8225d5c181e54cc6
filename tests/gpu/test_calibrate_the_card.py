"""The card of this machine can be calibrated in its two minutes, and the benchmark runs on it. Skips where there is none."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tightfit.cli.shared.local_cards import local_cards
from tightfit.devices.calibration import Calibration
from tightfit.devices.catalogue import find

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        shutil.which("nvidia-smi") is None or not local_cards(), reason="no NVIDIA card on this machine"
    ),
]


def test_a_card_is_calibrated_in_two_minutes(tmp_path: Path) -> None:
    path = tmp_path / "card.toml"
    began = time.monotonic()
    command = [sys.executable, "-m", "tightfit", "calibrate", "-o", str(path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < 120
    found = Calibration.load(path)
    assert not found.is_virtual
    card = found.applied_to(find(found.device))
    assert 100 << 20 < card.context_bytes < 3 << 30
    for name, fraction in found.efficiency.items():
        assert 0.02 < fraction <= 1, name
    for key, rate in found.link.items():
        assert key == "latency_seconds" or rate > 5e8, key
    predicted = [row for row in json.loads(done.stdout)["measured"] if row["predicted"]]
    assert len(predicted) > 50


def test_the_benchmark_measures_predicts_limits_and_records(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--tiny", "--recordings", "3", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [result["row"]["family"] for result in results] == ["residual", "vit", "decoder"]
    for result in results:
        measured, predicted = result["measured"], result["estimate"]
        assert "fault" not in measured, measured
        assert measured["process_bytes"] > measured["reserved_bytes"] >= measured["allocated_bytes"]
        assert predicted["allocated_bytes"] == pytest.approx(measured["allocated_bytes"], rel=0.05)
        assert result["limited"]["at_estimate"] in (True, False)
    assert (tmp_path / "recordings.zip").stat().st_size < 200_000
