"""Which products a selective checkpoint keeps, by the trace of the plain run."""

from pathlib import Path

import pytest

from tightfit.analysis.profile import Profile
from tightfit.capture.targets.target_kinds import GeneratorFunction
from tightfit.capture.trace import trace
from tightfit.devices.catalogue import find
from tightfit.techniques.registry import technique

PROGRAM = """\
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, inplace):
        super().__init__()
        self.first, self.second, self.act = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1), nn.SiLU(inplace=inplace)
        self.norm, self.third, self.last = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)

    def forward(self, x):
        x = torch.sigmoid(self.second(self.act(self.first(self.norm(x)))))
        return self.last(self.third(x))


def images(inplace):
    model = nn.Sequential(Block(inplace), Block(inplace), nn.Flatten(), nn.Linear(8 * 64 * 64, 2)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        model(torch.randn(8, 8, 64, 64, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield
"""


@pytest.mark.parametrize(("inplace", "kept"), [(False, [0, 2]), (True, [2])])
def test_a_product_that_the_activation_overwrites_is_not_kept(inplace: bool, kept: list[int], tmp_path: Path) -> None:
    """The second product is not saved: the sigmoid saves its own result. The third is, behind which the norm counts its batches in place."""
    file = tmp_path / "images.py"
    file.write_text(PROGRAM)
    target = GeneratorFunction(location=str(file), function="images", parameters={"inplace": inplace})
    tape = trace(target, label="images", device="RTX 4090", num_steps=2).tape
    options = technique("selective_checkpointing").options(Profile(tape, find("RTX 4090")))
    assert {tuple(option.settings["keep"]) for option in options} == {tuple(kept)}
