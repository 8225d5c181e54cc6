"""cuDNN plans its attention anew for each shape: a loop whose keys grow waits for it, a training step of one length does not."""

from pathlib import Path

import pytest

import tightfit
from tightfit.units import parse_seconds

LOOP = """
import torch
import torch.nn.functional as F
{setting}
layer = torch.nn.Linear(64, 64, device="cuda", dtype=torch.bfloat16)
keys = torch.randn(2, 4, 16, 64, device="cuda", dtype=torch.bfloat16)
with torch.no_grad():
    for _ in range(40):
        for _ in range(3):
            new = layer(F.scaled_dot_product_attention(keys[:, :, -1:], keys, keys))
        {grows}
"""
GROWS = "keys = torch.cat([keys, new], dim=2)"
TRAINED = """
import torch
import torch.nn.functional as F
layer = torch.nn.Linear(64, 64, device="cuda", dtype=torch.bfloat16)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
for length in ({lengths}):
    heads = layer(torch.randn(2, 4, length, 64, device="cuda", dtype=torch.bfloat16))
    F.scaled_dot_product_attention(heads, heads, heads).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def estimate(folder: Path, text: str, device: str = "H200") -> tuple[float, str]:
    """Seconds of the last step, and what is said of plans."""
    (folder / "program.py").write_text(text)
    found = tightfit.estimate(folder / "program.py", device)
    said = [each.what for each in found.assumptions if "cuDNN" in each.what]
    assert found.seconds_per_step is not None
    return found.seconds_per_step, said[0] if said else ""


def test_each_token_waits_for_a_plan(tmp_path: Path) -> None:
    plain, none = estimate(tmp_path, LOOP.format(setting="torch.backends.cuda.enable_cudnn_sdp(False)", grows=GROWS))
    seconds, said = estimate(tmp_path, LOOP.format(setting="", grows=GROWS))
    assert none == ""
    assert "40 here" in said
    assert "is part of the time" in said
    told = parse_seconds(said.split("about ")[1].split(",")[0])
    assert seconds - plain == pytest.approx(told, rel=0.1)


@pytest.mark.parametrize(("grows", "device"), [("pass", "H200"), (GROWS, "RTX 4090")])
def test_one_shape_is_planned_once_and_other_cards_ask_for_no_plans(tmp_path: Path, grows: str, device: str) -> None:
    seconds, said = estimate(tmp_path, LOOP.format(setting="", grows=grows), device)
    assert said == ""
    # Not even the one plan, which the first call of any process waits for.
    assert seconds < 0.01


def test_a_plan_suggests_to_do_without(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(LOOP.format(setting="", grows=GROWS))
    advice = tightfit.plan(tmp_path / "program.py", "H200", budget="20GiB").advice
    assert any("enable_cudnn_sdp(False)" in each and "40 here (about −800" in each for each in advice)


def test_of_training_they_are_told_beside_the_time(tmp_path: Path) -> None:
    alike, none = estimate(tmp_path, TRAINED.format(lengths="64, 64, 64, 64"))
    others, said = estimate(tmp_path, TRAINED.format(lengths="64, 64, 80, 64"))
    assert none == ""
    assert "2 here" in said
    assert "on top of the time per step" in said
    assert others == pytest.approx(alike, rel=0.5)
