"""`tightfit run --guard --budget`: the allocator gets what the CUDA context leaves of the budget, before CUDA is there."""

import sys
from pathlib import Path

import pytest
from tests.null.test_devices_command import with_nvidia_smi

from tightfit.cli.main import run
from tightfit.cli.variants import guarded_run
from tightfit.devices.catalogue import find
from tightfit.errors import UsageError
from tightfit.guarding.memory.process_budget import allocator_setting
from tightfit.units import GIB, MIB

SCRIPT = "import os\nprint(os.environ['PYTORCH_CUDA_ALLOC_CONF'])\n"


def test_the_share_leaves_room_for_what_is_outside_and_is_rounded_down() -> None:
    setting = allocator_setting(20 * GIB, capacity_bytes=24 * GIB, outside_bytes=GIB // 2)
    name, _, share = setting.partition(":")
    assert name == "per_process_memory_fraction"
    assert float(share) * 24 * GIB + GIB // 2 <= 20 * GIB < float(share) * 24 * GIB + GIB // 2 + MIB


@pytest.mark.parametrize(
    ("budget", "said"), [(25 * GIB, "the GPU has 24.00 GiB"), (300 * MIB, "the CUDA context alone takes about")]
)
def test_a_budget_that_cannot_be(budget: int, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        allocator_setting(budget, capacity_bytes=24 * GIB, outside_bytes=GIB // 2)


def test_a_script_has_the_limit_beside_its_own_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch", minversion="2.10")
    with_nvidia_smi(tmp_path, monkeypatch, "echo 'GPU-1, NVIDIA H200, 143771 MiB, 100000 MiB'")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    # A script's folder takes the first place, as with python.
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setattr(sys, "argv", ["tightfit"])
    (tmp_path / "train.py").write_text(SCRIPT)
    assert run(["run", "--guard", "--budget", "50%", str(tmp_path / "train.py")]) == 0
    out, err = capfd.readouterr()
    outside = find("h200").context.num_bytes
    share = float(out.strip().removeprefix("expandable_segments:True,per_process_memory_fraction:"))
    assert share == pytest.approx(0.5 - outside / (143_771 * MIB), abs=1e-5)
    assert "guard: at most 70.20 GiB of NVIDIA H200" in err
    assert "other processes hold 97.66 GiB of it: 42.75 GiB are free now, less than the budget" in err


def test_a_torch_whose_allocator_has_no_such_setting_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_nvidia_smi(tmp_path, monkeypatch, "echo 'GPU-1, NVIDIA H200, 143771 MiB, 100000 MiB'")
    monkeypatch.setattr(guarded_run, "installed_torch", lambda: (2, 9))
    (tmp_path / "train.py").write_text(SCRIPT)
    assert run(["run", "--guard", "--budget", "50%", str(tmp_path / "train.py")]) == 2
    assert "--budget needs torch 2.10 or later" in capsys.readouterr().err


def test_without_a_gpu_there_is_nothing_to_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "train.py").write_text(SCRIPT)
    assert run(["run", "--guard", "--budget", "20GiB", str(tmp_path / "train.py")]) == 2
    assert "there is no GPU on this machine" in capsys.readouterr().err
