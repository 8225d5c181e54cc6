"""What a traced program reads as CUDA_VISIBLE_DEVICES: what the user has set, of as many cards as it has."""

from pathlib import Path

import pytest

from tightfit.capture.targets.target_kinds import GeneratorFunction
from tightfit.capture.trace import trace

READS = """
import os, subprocess, sys, torch

def workload(expected, device_count=1):
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == expected, os.environ.get("CUDA_VISIBLE_DEVICES")
    assert torch.cuda.device_count() == device_count
    assert "TIGHTFIT_CUDA_VISIBLE_DEVICES" not in os.environ
    text = "import os; print(repr(os.environ['CUDA_VISIBLE_DEVICES']))"
    assert subprocess.run([sys.executable, "-c", text], capture_output=True, text=True).stdout == "''\\n"
    (torch.ones(4, device="cuda", requires_grad=True) ** 2).sum().backward()
    yield
"""


@pytest.mark.parametrize(
    ("own", "expected"), [(None, None), ("", None), ("-1", None), ("3", "3"), ("2, 3", "2"), ("GPU-8f2e", "GPU-8f2e")]
)
def test_the_program_reads_what_the_user_has_set(
    own: str | None, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work.py").write_text(READS)
    if own is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", own)
    target = GeneratorFunction(
        location=str(tmp_path / "work.py"), function="workload", parameters={"expected": expected}
    )
    assert trace(target, label="work.py", device="A100 80GB", num_steps=1).tape.storages.num_bytes.size
