"""Modules that take their shapes from a first call (`torch.nn.LazyLinear`): that call is made before the optimizer, and has nothing of a plan on it."""

import sys
from pathlib import Path

import pytest
import torch
from tests.cpu.applied import choice, plan_of, root
from torch import nn

from tightfit.cli.main import run

SCRIPT = """\
import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.LazyLinear(4), nn.LazyBatchNorm1d()).to(device)
x = torch.randn(4, 8, device=device)
with torch.set_grad_enabled({with_gradients}):
    model(x)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    loss = model(x).square().sum()
    loss.backward()
    optimizer.step()
print("loss", loss.item())
"""


@pytest.mark.parametrize("with_gradients", [True, False])
def test_a_model_has_its_plan_when_it_has_its_shapes(
    with_gradients: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(with_gradients=with_gradients))
    assert run(["estimate", "train.py", "--device", "RTX 4090"]) == 0, capfd.readouterr().err
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4), nn.BatchNorm1d(4))
    plan_of([choice("checkpointing", "Sequential.1")], roots=[root(model)]).save("plan.json")
    capfd.readouterr()
    exec(compile(script.read_text(), str(script), "exec"), {"__name__": "plain"})
    plain = capfd.readouterr().out
    assert run(["run", "--plan", "plan.json", "train.py"]) == 0, capfd.readouterr().err
    found = capfd.readouterr()
    assert found.out == plain
    assert "on Sequential: checkpointing of Sequential.1" in found.err
    assert torch.is_grad_enabled()
