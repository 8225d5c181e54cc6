"""Recordings without a card: of a virtual one, which programs that need a card find."""

import json
from pathlib import Path

import pytest

import tightfit
from tightfit.cli.main import run

WORKLOAD = """
import torch

def workload():
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 16)).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    while True:
        model(torch.randn(32, 64, device="cuda")).sum().backward()
        optimizer.step()
        yield
        optimizer.zero_grad()
"""


def test_without_a_card_the_first_steps_are_recorded_on_a_virtual_one_as_an_estimate_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A script that needs a card runs, its recording has the estimate's peak to the byte, and what reads recordings reads it."""
    monkeypatch.chdir(tmp_path)
    target = "work.py:workload"
    Path("work.py").write_text(WORKLOAD)
    assert run(["record", target]) == 0
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err.startswith("tightfit: wrote work.recording.pickle: 3 steps on a virtual NVIDIA H200 (there is no")
    assert said.err.count("\n") == 1
    assert run(["record", target, "--device", "RTX 4090", "-o", "x.pickle"]) == 0
    assert "x.pickle: 3 steps on a virtual NVIDIA GeForce RTX 4090, " in capfd.readouterr().err
    assert tightfit.replay("x.pickle").peak_reserved_bytes == tightfit.estimate(target, "RTX 4090").peak.reserved_bytes
    assert run(["doctor", "x.pickle", "--seconds", "0.1", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["origin"] == "estimate"
    assert run(["report", "x.pickle"]) == 0
