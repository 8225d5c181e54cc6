"""Who asks for an operator: what a forward makes for itself belongs to it, and what is called beside a model does not."""

import argparse
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tightfit
from tightfit.capture.observe import attribution
from tightfit.capture.observe.attribution import Attribution, is_of_another_library
from tightfit.capture.observe.recorder import Recorder
from tightfit.capture.targets.target_kinds import GeneratorFunction
from tightfit.capture.trace import trace
from tightfit.runtime.leaks.live_storages import LiveStorages
from tightfit.runtime.record_host import _CallStacks
from tightfit.tape import Phase, Tape

WORKLOAD = """
import torch


class Classifier(torch.nn.Module):
    def __init__(self, makes_loss):
        super().__init__()
        self.makes_loss = makes_loss
        self.head = torch.nn.Linear(64, 8)

    def forward(self, values, labels):
        scores = self.head(values)
        return torch.nn.CrossEntropyLoss()(scores, labels) if self.makes_loss else scores


def classifier(makes_loss):
    model = Classifier(makes_loss).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        labels = torch.zeros(4, dtype=torch.long, device="cuda")
        found = model(torch.ones(4, 64, device="cuda"), labels)
        loss = found if makes_loss else torch.nn.CrossEntropyLoss()(found, labels)
        loss.backward()
        optimizer.step()
        yield loss
"""


@pytest.mark.parametrize(("makes_loss", "module"), [(True, "Classifier"), (False, "CrossEntropyLoss")])
def test_a_loss_function_belongs_to_the_forward_that_makes_it(makes_loss: bool, module: str, tmp_path: Path) -> None:
    file = tmp_path / "workload.py"
    file.write_text(WORKLOAD)
    target = GeneratorFunction(location=str(file), function="classifier", parameters={"makes_loss": makes_loss})
    tape: Tape = trace(target, label="classifier", device="RTX 4090").tape
    found = {
        tape.strings[path]
        for name, path, phase in zip(tape.operators.name, tape.operators.module, tape.operators.phase, strict=True)
        if tape.strings[name].startswith("aten.nll_loss") and phase in (Phase.FORWARD, Phase.BACKWARD)
    }
    assert found == {module}


def test_other_libraries_are_neither_the_users_nor_torch_nor_pythons_own(tmp_path: Path) -> None:
    assert is_of_another_library(np.__file__)
    assert is_of_another_library("/usr/lib/python3/dist-packages/wandb/run.py")
    for own in (str(tmp_path / "train.py"), torch.__file__, tightfit.__file__, argparse.__file__, "<string>"):
        assert not is_of_another_library(own), own


def test_torch_is_known_where_its_environment_is_reached_by_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(torch.__file__).parent
    (tmp_path / "torch").symlink_to(folder)
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    anew = runpy.run_path(attribution.__file__)
    assert not anew["is_users_or_other"](str(tmp_path / "torch" / "nn" / "utils" / "clip_grad.py"))
    assert anew["is_users_or_other"](str(tmp_path / "train.py"))


def test_functions_that_are_written_alike_are_told_apart_by_their_files(tmp_path: Path) -> None:
    """Their code is equal, whatever file it is of: two packages with copies of one module."""

    def made(folder: str) -> Callable[..., Any]:
        space: dict[str, Any] = {}
        exec(compile("def inner(call): return call()", str(tmp_path / folder / "blocks.py"), "exec"), space)
        return space["inner"]

    both = [made("nets"), made("utils")]
    assert both[0].__code__ == both[1].__code__
    recorder = Recorder()
    lines = [inner(Attribution(recorder).line) for inner in both]
    assert [recorder.strings.texts[line].rpartition("/")[2] for line in lines] == ["blocks.py:1"] * 2
    assert len(set(lines)) == 2
    attribution_of_both = Attribution(recorder)
    assert [inner(attribution_of_both.line) for inner in both] == lines
    live, host = LiveStorages(), _CallStacks(are_wanted=True)
    sites = [inner(lambda: live._stacks.number(0)) for inner in both]
    assert [live.frames_of(site)[0][0].split("/")[-2:] for site in sites] == [
        ["nets", "blocks.py:1"],
        ["utils", "blocks.py:1"],
    ]
    numbers = [inner(host.number) for inner in both]
    assert [Path(host.as_frames()[number][0]["filename"]).parent.name for number in numbers] == ["nets", "utils"]
