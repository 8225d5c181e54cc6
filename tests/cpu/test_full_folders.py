"""A folder for temporary files that fills up while a program is traced is one line that says what to do."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tightfit.capture.processes.fork_server import NO_ROOM
from tightfit.capture.trace import _death

pytest.importorskip("torch")

SCRIPT = """
import torch

model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    model(torch.randn(4, 8, device="cuda")).sum().backward()
    optimizer.step()
with open("large.bin", "wb") as file:
    file.write(b"x" * (8 << 20))
"""


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A folder with room for 1 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = sys.platform == "linux" and os.geteuid() == 0
    if (
        not mounted
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=False).returncode
    ):
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_folder_that_fills_up_is_named(tmp_path: Path, small: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "tightfit", "estimate", "train.py", "--device", "RTX 4090"],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(small)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (3, "")
    assert f"could not be written to the folder for temporary files, {small}" in done.stderr
    assert "set TMPDIR to a folder with room" in done.stderr
    assert os.listdir(small) == []
    assert sorted(os.listdir(tmp_path)) == ["small", "train.py"]


def test_why_it_could_not_be_written_is_said() -> None:
    assert "(No space left on device)" in _death("train.py", NO_ROOM, "line\nNo space left on device\n")
    assert "(it is full)" in _death("train.py", NO_ROOM, "")
