"""Programs with two models, one after the other: what is copied beside a neighbouring block has its neighbour in the same model."""

from pathlib import Path

from tightfit.analysis.profile import Profile
from tightfit.analysis.relative_places import place_from
from tightfit.capture.targets.target_kinds import Script
from tightfit.capture.trace import Preparation, trace
from tightfit.devices.catalogue import find
from tightfit.techniques.registry import techniques

CARD = "RTX 4090"
PROGRAM = """
import torch
from torch import nn
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(64, 256).requires_grad_(False), nn.Linear(256, 64)
    def forward(self, x):
        return x + self.narrow(torch.tanh(self.wide(x)))
class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x
class Decoder(Encoder):
    pass
encoder, decoder = Encoder().cuda(), Decoder().cuda()
optimizer = torch.optim.SGD([p for m in (encoder, decoder) for p in m.parameters() if p.requires_grad], 0.1)
for _ in range(3):
    decoder(encoder(torch.randn(512, 64, device="cuda"))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


WITH_TARGET = """
import copy
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)) for _ in range(3)])
    def forward(self, x):
        return self.blocks(x)
net = Net().cuda()
target = copy.deepcopy(net).requires_grad_(False)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(3):
    x = torch.randn(512, 64, device="cuda")
    with torch.no_grad():
        wanted = target(x)
    (net(x) - wanted).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def _profile(program: str, folder: Path) -> Profile:
    path = folder / "train.py"
    path.write_text(program)
    preparation = Preparation(function="tightfit.runtime.attach:prepare", argument={"choices": []})
    traced = trace(Script(path=str(path), arguments=()), label="train.py", device=CARD, preparation=preparation)
    return Profile(traced.tape, find(CARD))


def test_weights_of_a_target_network_are_not_streamed_from_the_trained_one(tmp_path: Path) -> None:
    profile = _profile(WITH_TARGET, tmp_path)
    assert list(techniques()["weight_streaming"].options(profile)) == []
    assert list(techniques()["trained_weight_streaming"].options(profile))


def test_neighbours_of_a_block_are_of_its_own_model(tmp_path: Path) -> None:
    profile = _profile(PROGRAM, tmp_path)
    models = set()
    for name in ("weight_streaming", "activation_offload", "offloaded_checkpointing"):
        options = list(techniques()[name].options(profile))
        assert options, name
        for option in options:
            model = option.where.partition(".")[0]
            models.add(model)
            beside = [str(option.settings.get(key, "")) for key in ("preceding", "following")]
            assert {place_from(option.where, each).partition(".")[0] for each in beside if each} <= {model}, option
    assert models == {"Encoder", "Decoder"}
