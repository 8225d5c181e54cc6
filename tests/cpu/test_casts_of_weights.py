"""Autocast's copies of weights stay until its outermost context ends, whatever is done to the blocks that have made them: promises know it."""

import functools
from pathlib import Path

import pytest
from tests.cpu import module_training
from tests.cpu.module_training import DEVICE, promised_peak, timeline

from tightfit.analysis.profile import Profile
from tightfit.devices.catalogue import find
from tightfit.tape import Tape
from tightfit.techniques.registry import technique

# Of each block the copies of its weights take 8 MiB; most is held where the head is.
PROGRAM = """\
import contextlib

import torch
from torch import nn


def half(is_on):
    return torch.autocast("cuda", dtype=torch.bfloat16) if is_on else contextlib.nullcontext()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(1024, 2048), nn.Linear(2048, 1024)

    def forward(self, rows):
        return rows + self.narrow(torch.relu(self.wide(rows)))


class Net(nn.Module):
    def __init__(self, casts):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(1024, 8192)
        self.casts = casts

    def forward(self, rows):
        with half(self.casts):
            for block in self.blocks:
                rows = block(rows)
            logits = self.head(rows).float()
            return nn.functional.mse_loss(logits, logits.detach().exp().square().tanh())


def train(where):
    model = Net(where == "in the model").cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        rows = torch.randn(2048, 1024, device="cuda")
        with half(where != "in the model"):
            loss = model(rows)
            if where == "around all":
                loss.backward()
        if where != "around all":
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield
"""
PLACES = ("in the model", "around the model", "around all")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("casts") / "train.py"
    file.write_text(PROGRAM)
    return file


@functools.cache
def plain_run(program: Path, where: str) -> Tape:
    return module_training.traced(str(program), "train", where=where)


@pytest.mark.parametrize("where", PLACES)
def test_the_tape_says_until_when_they_are_held(where: str, program: Path) -> None:
    tape = plain_run(program, where)
    lifetimes = Profile(tape, find(DEVICE)).lifetimes
    storages, rows = lifetimes.casts.T
    # Weights and biases, in each of two steps.
    of_step = 6 * 4 + 2
    assert len(storages) == 2 * of_step
    sizes = {2 * 1024 * 2048, 2 * 2048, 2 * 1024, 2 * 1024 * 8192, 2 * 8192}
    assert set(tape.storages.num_bytes[storages].tolist()) == sizes
    assert tape.casts.is_of_module.all() == (where == "in the model")
    # All of one step, and before the next begins.
    ends = tape.casts.end[rows].reshape(2, -1)
    assert (ends == ends[:, :1]).all()
    assert ends[0, 0] <= lifetimes.allocated_at[storages[of_step:]].min()
    if where == "around all":
        assert (lifetimes.freed_at[storages] <= tape.casts.end[rows]).all()


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("name", ["checkpointing", "micro_batches"])
def test_what_is_promised_is_what_a_trace_holds(name: str, where: str, program: Path) -> None:
    plain = plain_run(program, where)
    offered = list(technique(name).options(Profile(plain, find(DEVICE))))
    options = offered[:1] if name == "micro_batches" else offered
    assert options
    promised = promised_peak(plain, options)
    found = int(timeline(module_training.traced(str(program), "train", options, where=where)).max())
    assert found == pytest.approx(promised, rel=0.02)
