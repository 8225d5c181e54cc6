"""The library as a program uses it: estimate a workload, keep its tape, estimate the tape for other cards."""

import json
from pathlib import Path

import pytest

import tightfit
from tightfit.cli.main import run
from tightfit.errors import CaptureError, UsageError

MODEL = """\
import torch


def workload(batch_size=8):
    layer = torch.nn.Linear(1024, 1024, bias=False).cuda()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    while True:
        loss = layer(torch.randn(batch_size, 1024, device="cuda")).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss
"""
MIB = 1 << 20


@pytest.fixture(autouse=True)
def in_a_folder_with_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)


def test_an_estimate_of_a_function_with_its_parameters() -> None:
    small, large = (
        tightfit.estimate("model.py:workload", "RTX 4090", parameters=[f"batch_size={rows}"], steps=2)
        for rows in (8, 16384)
    )
    assert small.device == "NVIDIA GeForce RTX 4090"
    assert small.at_peak["parameters"] == large.at_peak["parameters"] == 4 * MIB
    assert [span.name for span in small.spans if span.kind == "step"] == ["step 1", "step 2"]
    assert small.fits
    assert large.at_peak["activations"] - small.at_peak["activations"] > 60 * MIB
    assert any(holder.line == "model.py:5" and holder.category == "parameters" for holder in small.allocation_sites)


def test_a_saved_run_is_estimated_like_the_run_itself(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["estimate", "model.py:workload", "--device", "4090", "--json"]
    assert run([*command, "--save-tape", "run.npz"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert run(["estimate", "run.npz", "--device", "4090", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert {**first, "elapsed_seconds": 0} == {**again, "elapsed_seconds": 0}
    other = tightfit.estimate(tightfit.Tape.load("run.npz"), "4060")
    assert other.peak.reserved_bytes == first["peak"]["reserved_bytes"]
    assert other.device == "NVIDIA GeForce RTX 4060"


def test_allocator_settings_come_from_the_environment_unless_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["estimate", "model.py:workload", "-p", "batch_size=2049", "--device", "4090"]
    assert run([*command, "--save-tape", "run.npz"]) == 0
    tape = tightfit.Tape.load("run.npz")
    plain = tightfit.estimate(tape, "4090").peak.allocated_bytes
    rounded = tightfit.estimate(tape, "4090", alloc_conf="roundup_power2_divisions:2").peak.allocated_bytes
    assert rounded > plain
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "roundup_power2_divisions:2")
    assert tightfit.estimate(tape, "4090").peak.allocated_bytes == rounded
    assert tightfit.estimate(tape, "4090", alloc_conf="").peak.allocated_bytes == plain


def test_errors_are_exceptions_of_one_tree() -> None:
    with pytest.raises(UsageError, match=r"model\.py has no function nothing"):
        tightfit.estimate("model.py:nothing", "4090")
    Path("fails.py").write_text("raise KeyError('rows')\n")
    with pytest.raises(CaptureError, match=r"fails\.py raised KeyError at fails\.py:1"):
        tightfit.estimate("fails.py", "4090")
    assert issubclass(UsageError, tightfit.TightfitError)
    assert issubclass(CaptureError, tightfit.TightfitError)
