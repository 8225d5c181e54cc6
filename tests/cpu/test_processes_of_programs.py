"""Programs that start processes of their own: one for each GPU, and forks that use the GPU or do not."""

from pathlib import Path

import pytest

from tightfit import fit
from tightfit.errors import CaptureError

TRAIN = """
import os, sys, torch
import torch.multiprocessing as mp

def train(rank, width):
    assert rank == 0
    model = torch.nn.Linear(width, width).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(5):
        model(torch.ones(4, width, device="cuda")).sum().backward()
        optimizer.step()

def exit_code_of(end):
    pid = os.fork()
    if pid == 0:
        end()
        raise ValueError
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""


def test_one_process_for_each_gpu_is_run_in_place_and_forks_end_by_themselves(tmp_path: Path) -> None:
    script = tmp_path / "spawns.py"
    script.write_text(
        TRAIN
        + """
assert exit_code_of(lambda: sys.exit(3)) == 3
assert exit_code_of(lambda: None) == 1
assert mp.spawn(train, nprocs=torch.cuda.device_count(), args=(64,), join=False).join()
"""
    )
    tape = fit.capture(str(script), device="RTX 4090")
    assert (len(tape.operators_of_steps), tape.coverage.stopped) == (3, "")


def test_a_fork_that_uses_the_gpu_ends_the_trace_at_once(tmp_path: Path) -> None:
    script = tmp_path / "forks.py"
    script.write_text(TRAIN + "\nexit_code_of(lambda: train(0, 64))\n")
    with pytest.raises(CaptureError, match=r"forks\.py:7 uses the GPU in a forked process"):
        fit.capture(str(script), device="RTX 4090")


def test_a_program_that_asks_nvidia_smi_finds_the_virtual_gpu(tmp_path: Path) -> None:
    script = tmp_path / "asks.py"
    script.write_text(
        TRAIN
        + """
import subprocess
words = ["nvidia-smi", "--query-gpu=name,memory.free", "--format=csv,noheader,nounits"]
name, free = subprocess.check_output(words, text=True).strip().split(", ")
assert (name, int(free)) == (torch.cuda.get_device_name(), torch.cuda.mem_get_info()[0] >> 20), (name, free)
train(0, 64)
"""
    )
    assert len(fit.capture(str(script), device="RTX 4090").operators_of_steps) == 3
