"""What a traced run is called by: the classes of its modules, and the modules whose outputs a block keeps."""

from pathlib import Path

import pytest
from tests.cpu.run_arguments import run_arguments

from tightfit.capture.targets.target_kinds import GeneratorFunction
from tightfit.fit.traced_runs import TracedRun, TracedRuns
from tightfit.planner.setting_words import setting_words
from tightfit.techniques.recomputation.selective_checkpointing import SelectiveCheckpointing

WORKLOAD = """
import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        return x + self.out(functional.gelu(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))


def workload():
    model = nn.Sequential(*(Block(256) for _ in range(3))).cuda()
    # Another model of the same class with another class at the same path: neither may be shown for it.
    other = nn.Sequential(nn.Linear(256, 256), nn.ReLU()).cuda()
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    while True:
        loss = other(model(torch.randn(4, 128, 256, device="cuda"))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TracedRun:
    path = tmp_path_factory.mktemp("names") / "workload.py"
    path.write_text(WORKLOAD)
    target = GeneratorFunction(location=str(path), function="workload", parameters={})
    return TracedRuns(**run_arguments(target, "names")).run_with(())


def test_a_tape_has_the_class_of_each_module_unless_two_models_differ_there(run: TracedRun) -> None:
    classes = run.tape.module_classes
    assert (classes["Sequential"], classes["Sequential.2"], classes["Sequential.2.qkv"]) == (
        "Sequential",
        "Block",
        "Linear",
    )
    assert "Sequential.0" not in classes
    assert "Sequential.1" not in classes


def test_a_block_keeps_outputs_by_the_names_of_their_modules(run: TracedRun) -> None:
    (option, *_) = [o for o in SelectiveCheckpointing().options(run.profile) if o.where == "Sequential.2"]
    assert option.settings["outputs"] == ["qkv", "attention"]
    assert setting_words(option.settings) == "keeps the outputs of `qkv`, `attention`"


def test_a_tape_keeps_the_classes_in_its_file(run: TracedRun, tmp_path: Path) -> None:
    run.tape.save(tmp_path / "run.npz")
    assert type(run.tape).load(tmp_path / "run.npz").module_classes == run.tape.module_classes
