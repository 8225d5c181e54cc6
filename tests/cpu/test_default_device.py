"""Programs that make their tensors on the card by `torch.set_default_device`: our own tensors at the host are made there all the same."""

import ast
from pathlib import Path

import pytest

import tightfit
from tightfit.capture.targets.target_kinds import GeneratorFunction
from tightfit.capture.trace import Preparation, trace

ROOT = Path(tightfit.__file__).parent
# What torch gives the default device (torch/utils/_device.py, `_device_constructors`).
MAKES = {"arange", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randn", "scalar_tensor", "tensor", "zeros"}  # fmt: skip
ROOMS = ("capture/dispatch", "capture/collectives", "capture/steps", "effects", "torch_hooks", "engine", "techniques")

PROGRAM = """
import torch
from torch import nn

torch.set_default_device("cuda")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        # Biases are so small that their values are known.
        self.inner = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GELU(), nn.Conv2d(8, 8, 3))
        self.head = nn.Linear(8, 16)

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.head(self.inner(x).mean((2, 3))), y)


def steps():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    while True:
        optimizer.zero_grad()
        model(torch.randn(8, 3, 16, 16), torch.zeros(8, dtype=torch.long)).backward()
        optimizer.step()
        yield
"""


def test_streamed_weights_of_a_program_with_a_default_device(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    settings = {"blocks": ["inner.0", "inner.2"], "smallest_bytes": 1, "host_bytes": 1 << 20}
    given = {"saves_bytes": 0, "adds_seconds": 0.0, "exact": True}
    choices = [{"technique": "trained_weight_streaming", "where": "Net", "settings": settings, **given}]
    preparation = Preparation(function="tightfit.runtime.attach:prepare", argument={"choices": choices})
    target = GeneratorFunction(location=str(file), function="steps", parameters={})
    assert trace(target, label="steps", device="RTX 4090", num_steps=2, preparation=preparation).tape


def _unnamed(file: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MAKES):
            continue
        owner = node.func.value
        if (
            isinstance(owner, ast.Name)
            and owner.id == "torch"
            and not any(k.arg in ("device", None) for k in node.keywords)
        ):
            found.append(f"{file.relative_to(ROOT)}:{node.lineno} torch.{node.func.attr}")
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_every_tensor_that_we_make_names_its_device(room: str) -> None:
    assert not [line for file in sorted((ROOT / room).rglob("*.py")) for line in _unnamed(file)]
