"""The calls of a script that only predicts are in its time, those that are answered and not traced too."""

from pathlib import Path

import pytest

from tightfit import fit
from tightfit.tape.allocated_bytes import allocated_bytes

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


KEEPING = """
import torch
model = torch.nn.Linear(64, 1 << 18).cuda().eval()
kept = []
model.register_forward_hook(lambda module, args, out: kept.append(out%s))
with torch.no_grad():
    for _ in range(20):
        model(torch.zeros(8, 64, device="cuda"))
"""


@pytest.mark.parametrize("alias", ["", ".detach()"])
def test_results_that_a_hook_keeps_add_up(tmp_path: Path, alias: str) -> None:
    script = tmp_path / "predict.py"
    script.write_text(KEEPING % alias)
    tape = fit.capture(str(script), device="RTX 4090")
    assert allocated_bytes(tape).max() > 20 * 8 * 4 << 18
