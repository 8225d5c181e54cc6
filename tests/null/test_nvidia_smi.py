"""The `nvidia-smi` of a traced program: it answers with the virtual GPU, in the forms that scripts read."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tightfit.capture.patches.nvidia_smi import install

NAME = "NVIDIA GeForce RTX 4060"


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.environ["PATH"])
    install(
        str(tmp_path / "with a space"),
        name=NAME,
        nominal_bytes=8188 << 20,
        free_bytes=7783 << 20,
        compute_capability=(8, 9),
    )


@pytest.mark.skipif(sys.platform == "win32", reason="there is no such program")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--query-gpu=memory.free --format=csv,noheader,nounits", "7783\n"),
        ("--query-gpu=name,memory.used,memory.total --format=csv,noheader", f"{NAME}, 405 MiB, 8188 MiB\n"),
        ("--query-gpu memory.free --format csv", "memory.free [MiB]\n7783 MiB\n"),
        ("-i 0 --query-gpu=index,gpu_name,compute_cap,utilization.gpu,fan.speed --format=csv,nounits",
         f"index, gpu_name, compute_cap, utilization.gpu, fan.speed\n0, {NAME}, 8.9, 0, [N/A]\n"),
        ("-L", f"GPU 0: {NAME} (UUID: GPU-00000000-0000-0000-0000-000000000000)\n"),
        ("--query-compute-apps=pid,used_memory --format=csv,noheader", ""),
    ],
)  # fmt: skip
def test_what_scripts_ask(words: str, said: str) -> None:
    assert subprocess.check_output(["nvidia-smi", *words.split()], text=True) == said
    assert subprocess.check_output(f"nvidia-smi {words}", shell=True, text=True) == said


def test_the_table_names_the_card_and_its_memory() -> None:
    said = subprocess.check_output("nvidia-smi", text=True)
    assert NAME in said
    assert "405MiB / 8188MiB" in said
