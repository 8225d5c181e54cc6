"""What is estimated is what the card of this machine holds. Skips where there is none."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tightfit.cli.shared.local_cards import local_cards

HERE = Path(__file__).parent

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        shutil.which("nvidia-smi") is None or not local_cards(), reason="no NVIDIA card on this machine"
    ),
]


def _run(*command: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, *command], cwd=HERE, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("workload", "allocated_tolerance", "reserved_tolerance"),
    [
        ("perceptron", 0.005, 0.01),
        ("transformer", 0.005, 0.01),
        ("transformer_in_autocast", 0.005, 0.01),
        ("convolutions", 0.01, 0.05),
    ],
)
def test_the_peaks_of_the_allocator_are_those_of_the_card(
    workload: str, allocated_tolerance: float, reserved_tolerance: float
) -> None:
    measured = _run("measure.py", workload)
    card = local_cards()[0].name
    peak = _run("-m", "tightfit", "estimate", f"workloads.py:{workload}", "--device", card, "--json")["peak"]
    assert peak["allocated_bytes"] == pytest.approx(measured["allocated"], rel=allocated_tolerance)
    assert peak["reserved_bytes"] == pytest.approx(measured["reserved"], rel=reserved_tolerance)
