"""Copies of the weights that a program holds in dicts and lists are weights in the breakdown, and momenta of its own are not."""

from pathlib import Path

import pytest

import tightfit

PROGRAM = """
import copy
import torch

model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(4)]).cuda()
held = {held}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.randn(8, 512, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for old, new in zip(held.values() if isinstance(held, dict) else held, model.parameters()):
            old.mul_(0.9).add_(new, alpha=0.1)
"""


@pytest.mark.parametrize(
    ("held", "times"),
    [
        ("copy.deepcopy(model.state_dict())", 2),
        ("[p.clone().detach() for p in model.parameters()]", 2),
        ("[p.cuda() for p in [p.detach().cpu() for p in model.parameters()]]", 2),
        ("[torch.zeros_like(p) for p in model.parameters()]", 1),
    ],
)
def test_a_copy_of_the_weights_is_told_by_names_or_sizes(held: str, times: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM.format(held=held))
    found = tightfit.estimate(str(tmp_path / "train.py"), "RTX 4090").to_json()
    weights = 4 * (512 * 512 + 512) * 4
    assert found["at_peak"]["parameters"] == times * weights
