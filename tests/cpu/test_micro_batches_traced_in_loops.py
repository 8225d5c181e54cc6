"""Micro-batches in Lightning's loop, on the virtual card: what they save of an unmodified script, and what is advice."""

import contextlib
import importlib.util
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from tests.cpu.module_training import DEVICE, choice, promised_peak, timeline

from tightfit.analysis.profile import Profile
from tightfit.capture.targets.target_kinds import Script
from tightfit.capture.trace import Preparation, trace
from tightfit.devices.catalogue import find
from tightfit.errors import ApplyError
from tightfit.planner.option import Option
from tightfit.tape import Tape
from tightfit.techniques.micro_batches.micro_batches import MicroBatches

# Many traces, of which each commit tries a half.
pytestmark = pytest.mark.by_turns(2)

# The traced process imports it, this one need not.
if importlib.util.find_spec("lightning") is None:
    pytest.skip("lightning is not installed", allow_module_level=True)

SCRIPT = """
import {package} as L, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(6)), {layers} nn.Linear(512, 10))
        self.loss = nn.CrossEntropyLoss()

    def training_step(self, batch, batch_idx):
        loss = self.loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

data = TensorDataset(torch.randn(12 * 1024, 512), torch.randint(0, 10, (12 * 1024,)))
trainer = L.Trainer(max_epochs=1, logger=False, enable_checkpointing=False, precision={precision!r})
trainer.fit(Lit(), DataLoader(data, batch_size=3 * 1024, shuffle=True))
"""


def traced_script(tmp_path: Path, options: Sequence[Option] = (), **settings: Any) -> Tape:
    """The tape of two steps of the script, with options on it."""
    script = tmp_path / "train.py"
    script.write_text(
        SCRIPT.format(**{"package": "lightning.pytorch", "layers": "", "precision": "32-true"} | settings)
    )
    chosen = [asdict(choice(o.technique, o.where, **o.settings)) for o in options]
    preparation = Preparation(function="tightfit.runtime.attach:prepare", argument={"choices": chosen})
    return trace(
        Script(path=str(script), arguments=()), label="train.py", device=DEVICE, num_steps=2, preparation=preparation
    ).tape


def test_the_traced_saving_is_about_the_promised_one(tmp_path: Path) -> None:
    plain = traced_script(tmp_path, package="pytorch_lightning")
    options = list(MicroBatches().options(Profile(plain, find(DEVICE))))
    assert [option.settings["loop"] for option in options] == ["Lightning"] * 3
    before, promised = int(timeline(plain).max()), promised_peak(plain, options[1:2])
    found = int(timeline(traced_script(tmp_path, options[1:2], package="pytorch_lightning")).max())
    assert found < 0.6 * before
    assert found == pytest.approx(promised, abs=MicroBatches.tolerance * (before - promised))


@pytest.mark.parametrize("hook", ["", "def on_before_backward(self, loss): self.scale = 2.0"])
def test_a_trace_refuses_what_a_run_refuses(tmp_path: Path, hook: str) -> None:
    """Beside recomputation, what changes between the passes is looked at; Lightning itself changes things on the module."""
    script = tmp_path / "train.py"
    text = SCRIPT.format(package="lightning.pytorch", layers="", precision="32-true")
    script.write_text(text.replace("    def configure_optimizers", f"    {hook}\n\n    def configure_optimizers"))
    parts = choice("micro_batches", "batch", num_parts=2, draws_anew=False, loop="Lightning")
    chosen = [asdict(each) for each in (parts, choice("checkpointing", "Sequential.0"))]
    preparation = Preparation(function="tightfit.runtime.attach:prepare", argument={"choices": chosen})
    expected = pytest.raises(ApplyError, match="scale was changed between") if hook else contextlib.nullcontext()
    with expected:
        trace(Script(path=str(script), arguments=()), label="", device=DEVICE, num_steps=2, preparation=preparation)


def test_a_batch_norm_in_a_framework_is_advice(tmp_path: Path) -> None:
    plain = traced_script(tmp_path, layers="nn.BatchNorm1d(512),")
    assert plain.loop == "Lightning"
    assert not list(MicroBatches().options(Profile(plain, find(DEVICE))))
    (row,) = MicroBatches().advice(Profile(plain, find(DEVICE)))
    assert "statistics from the whole batch" in row.what
    assert not row.is_exact


TRAINER = """
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))

    def forward(self, values):
        return self.net(values)

class OwnLoss(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return nn.functional.cross_entropy(model(inputs["values"]), inputs["labels"])

data = [{"values": torch.zeros(64), "labels": 1}] * 64
arguments = TrainingArguments(
    output_dir="out", per_device_train_batch_size=16, max_steps=3, report_to="none", fp16=True, remove_unused_columns=False
)
OwnLoss(model=Scores(), args=arguments, train_dataset=data).train()
"""


def test_the_trainer_is_known_with_a_scaler_too(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    script = tmp_path / "train.py"
    script.write_text(TRAINER.replace('"out"', repr(str(tmp_path))))
    tape = trace(Script(path=str(script), arguments=()), label="train.py", device=DEVICE, num_steps=2).tape
    assert tape.loop == "Trainer"
    assert {option.settings["loop"] for option in MicroBatches().options(Profile(tape, find(DEVICE)))} == {"Trainer"}
