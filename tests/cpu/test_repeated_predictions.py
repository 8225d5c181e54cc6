"""The calls of a script that only predicts are in its time, those that are answered and not traced too."""

from pathlib import Path

from tightfit import fit

SCRIPT = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).cuda().eval()
with torch.no_grad():
    for _ in range(20):
        model(torch.zeros(8, 64, device="cuda"))
"""


def test_each_call_has_its_operators(tmp_path: Path) -> None:
    script = tmp_path / "predict.py"
    script.write_text(SCRIPT)
    tape = fit.capture(str(script), device="RTX 4090")
    products = tape.operators.name == tape.strings.index("aten.addmm")
    assert products.sum() == len(tape.geometry.operator) == 40
    assert products[tape.geometry.operator].all()
    assert any("repeat themselves" in each.what for each in tape.assumptions)
    assert not any("time leaves out" in each.what for each in tape.assumptions)
