"""Products and convolutions of float32 are computed in what the program says: TF32 or not, by the older switches and by the newer ones."""

from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest

from tightfit.capture.trace_settings import TraceSettings
from tightfit.cost.classes import operator_class
from tightfit.cost.roofline import arithmetic_of_operators
from tightfit.devices.catalogue import find
from tightfit.devices.cublas_workspaces import torch_version
from tightfit.fit import capture
from tightfit.simulate.timeline import step_seconds
from tightfit.tape import Tape

PROGRAM = """
import torch
from torch import nn

def train(setting=""):
    exec(setting)
    net = nn.Sequential(nn.Conv2d(8, 64, 3), nn.Flatten(), nn.Linear(64 * 36, 2048)).cuda()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    while True:
        net(torch.randn(2048, 8, 8, 8, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield
"""
# From torch 2.9 on.
NEWER = pytest.mark.skipif(torch_version(version("torch")) < (2, 9), reason="this torch has the older switches alone")


def arithmetic(tape: Tape) -> dict[str, set[str]]:
    """The types that products and convolutions of the tape compute in."""
    kinds = np.array([operator_class(tape.strings[n]) for n in tape.operators.name.tolist()])
    types = arithmetic_of_operators(tape)
    return {kind: set(types[kinds == kind].tolist()) for kind in ("matmul", "convolution")}


@pytest.mark.parametrize(
    ("setting", "products", "convolutions"),
    [
        ("torch.set_float32_matmul_precision('high')", "tf32", "tf32"),
        ("torch.backends.cuda.matmul.allow_tf32 = True; torch.backends.cudnn.allow_tf32 = False", "tf32", "float32"),
        pytest.param("torch.backends.fp32_precision = 'ieee'", "float32", "float32", marks=NEWER),
    ],
)
def test_the_program_says_whether_float32_is_computed_in_tf32(
    tmp_path: Path, setting: str, products: str, convolutions: str
) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.replace("exec(setting)", setting))
    tape = capture(f"{path}:train", device="a100", tracing=TraceSettings(steps=1))
    saved = tmp_path / "tape.npz"
    tape.save(saved)
    for each in (tape, Tape.load(saved)):
        assert arithmetic(each) == {"matmul": {products}, "convolution": {convolutions}}
    if products == "tf32" == convolutions:
        plain = step_seconds(tape, find("a100"), tf32_matmul=False)[-1]
        assert step_seconds(tape, find("a100"))[-1] < 0.7 * plain
        # A card without such units computes in float32.
        assert step_seconds(tape, find("v100")) == step_seconds(tape, find("v100"), tf32_matmul=False)
