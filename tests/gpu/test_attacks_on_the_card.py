"""No technique is wrong on the card of this machine, where copies and kernels run beside each other. Skips where there is none."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no card that torch can use on this machine"),
]


def test_programs_are_right_or_refused_with_what_moves_between_card_and_host() -> None:
    command = [sys.executable, "-m", "tests.attacks.on_card", "--minutes", "0.5"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    # "120 programs: {'right': 950, 'refused': 30, ...}"
    counts = ast.literal_eval(done.stdout.splitlines()[-1].partition(": ")[2])
    assert counts["right"] > 100
