"""What is offered wraps forwards, so it is at modules that are called by themselves: no list of modules is, and no module whose parts alone the program runs."""

from pathlib import Path

import pytest
from tests.cpu.run_arguments import run_arguments

from tightfit.analysis import recomputable
from tightfit.analysis.recomputable import blocks
from tightfit.analysis.streamed_uses import StreamedUses
from tightfit.capture.targets.target_kinds import GeneratorFunction
from tightfit.fit.traced_runs import TracedRun, TracedRuns
from tightfit.techniques.tiling.tiled_tokens_options import tiled_tokens_options

WORKLOAD = """
import torch
from torch import nn


class Mixer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.narrow(torch.nn.functional.gelu(self.wide(x)))


class Encoder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.stages = nn.ModuleList(nn.ModuleList(Mixer(width) for _ in range(2)) for _ in range(2))
        self.plain = nn.ModuleList((nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()))
        self.named = nn.ModuleDict({name: Mixer(width) for name in "ab"})

    def forward(self, x):
        raise NotImplementedError


class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.encoder = Encoder(width)
        self.chain = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())

    def forward(self, x):
        for block in (*self.encoder.stages[0], *self.encoder.stages[1], *self.encoder.plain, *self.encoder.named.values()):
            x = block(x)
        return self.chain(x)


def workload():
    model = Model(64).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        model(torch.randn(16384, 64, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TracedRun:
    path = tmp_path_factory.mktemp("called") / "workload.py"
    path.write_text(WORKLOAD)
    target = GeneratorFunction(location=str(path), function="workload", parameters={})
    return TracedRuns(**run_arguments(target, "called")).run_with(())


def test_a_tape_has_the_modules_that_were_called_and_keeps_them_in_its_file(run: TracedRun, tmp_path: Path) -> None:
    called = run.tape.called_modules
    assert {"Model", "Model.chain", "Model.chain.0", "Model.encoder.stages.1.0", "Model.encoder.named.a"} <= called
    assert not {"Model.encoder", "Model.encoder.stages", "Model.encoder.stages.1", "Model.encoder.plain"} & called
    run.tape.save(tmp_path / "run.npz")
    assert type(run.tape).load(tmp_path / "run.npz").called_modules == called


def test_nothing_is_offered_at_a_module_that_is_never_called(run: TracedRun) -> None:
    called, profile = run.tape.called_modules, run.profile
    tiled = {option.where for option in tiled_tokens_options("tiled_tokens", profile)}
    assert tiled and tiled <= called
    assert {block.path for block in blocks(profile.modules)} <= called
    assert [sequence.path for sequence in profile.sequences] == ["Model.chain"]
    streamed = [block.path for block in StreamedUses(profile, with_trained=True).blocks.values()]
    assert streamed and set(streamed) <= called
    # A list in a list has its blocks streamed one by one.
    assert "Model.encoder.stages.1.0" in streamed


def test_blocks_that_are_small_are_offered_where_all_of_them_are_not(
    run: TracedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if they were some hundred.
    monkeypatch.setattr(recomputable, "SMALLEST_SHARE", 0.5)
    monkeypatch.setattr(recomputable, "_SMALLEST_SHARE_OF_ALIKE", 0.3)
    found = [block.path for block in blocks(run.profile.modules)]
    assert found == [f"Model.encoder.stages.{stage}.{number}" for stage in range(2) for number in range(2)]
    monkeypatch.setattr(recomputable, "_SMALLEST_SHARE_OF_ALIKE", 0.9)
    assert not blocks(run.profile.modules)
