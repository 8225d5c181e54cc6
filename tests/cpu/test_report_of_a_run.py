"""`tightfit report` of a workload that is traced for it, and the clock of torch.profiler that a recording is laid over."""

import json
import time
from pathlib import Path

import pytest
import torch
from tests.histories import training
from torch.profiler import ProfilerActivity, profile, record_function

from tightfit.cli.main import run
from tightfit.reports.perfetto import merged

RESNET = Path(__file__).parents[2] / "examples" / "train_resnet.py"


def test_a_generator_function_is_traced_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "resnet.html"
    small = ("-p", "batch_size=2", "-p", "image_size=64", "--steps", "2")
    assert run(["report", f"{RESNET}:train", "--device", "RTX 3060", "-o", str(page), *small]) == 0
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"wrote {page} (")
    data = json.loads(page.read_text().partition('id="data">')[2].partition("</script>")[0])
    assert any(text.startswith("ResNet50.blocks") for text in data["texts"])
    assert {"step 1", "step 2"} <= {span["name"] for span in data["summary"]["spans"]}
    assert data["summary"]["cards"][0]["device"] == "NVIDIA GeForce RTX 3060"


def test_a_profile_counts_unix_time_from_its_beginning(tmp_path: Path) -> None:
    """So that a recording, whose events have Unix time too, lies where it belongs: here its first event at the marked range."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        torch.ones(8) + 1
        before_us = time.time_ns() // 1000
        with record_function("marked"):
            torch.ones(8) + 1
        after_us = time.time_ns() // 1000 + 1
    found.export_chrome_trace(str(tmp_path / "profile.json"))
    text, overlaps = merged(training(), tmp_path / "profile.json", began_us=before_us)
    events = json.loads(text)["traceEvents"]
    (mark,) = (event for event in events if event.get("name") == "marked" and event["ph"] == "X")
    first = next(event for event in events if event["ph"] == "C")
    assert overlaps
    assert 0 <= mark["ts"] - first["ts"] <= after_us - before_us
