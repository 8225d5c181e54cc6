"""What a loop keeps alive by accident is named by its line, and nothing else is."""

import re
from pathlib import Path

import pytest
import torch
from tests.cpu import kept_alive_models as models
from tests.cpu.module_training import DEVICE

from tightfit.analysis.profile import Profile
from tightfit.capture.targets.target_kinds import GeneratorFunction
from tightfit.capture.trace import trace
from tightfit.devices.catalogue import find
from tightfit.errors import ApplyError
from tightfit.planner.suggestion import Suggestion
from tightfit.techniques.lifetimes.kept_alive import KeptAlive
from tightfit.techniques.session import Session

MIB = 1 << 20


def advice(function: str, num_steps: int = 3) -> list[Suggestion]:
    target = GeneratorFunction(location=models.__file__, function=function, parameters={})
    tape = trace(target, label=function, device=DEVICE, num_steps=num_steps).tape
    assert list(KeptAlive().options(Profile(tape, find(DEVICE)))) == []
    return list(KeptAlive().advice(Profile(tape, find(DEVICE))))


def line_of(text: str) -> str:
    lines = Path(models.__file__).read_text().splitlines()
    return next(f"kept_alive_models.py:{number}" for number, line in enumerate(lines, 1) if text in line)


def test_logits_that_live_until_their_name_is_bound_again() -> None:
    (row,) = advice("lingering")
    assert line_of("logits = model(") in row.what
    assert "through the next forward" in row.what
    assert row.saves_bytes == 4096 * 4096 * 4


def test_a_list_that_grows() -> None:
    rows = advice("growing")
    assert any("a leak" in row.what for row in rows)
    leak = next(row for row in rows if "a leak" in row.what)
    assert re.search(r"more allocated after each step \(a tensor of Linear\)", leak.what)
    assert line_of("hidden = model[0]") in leak.what
    assert leak.saves_bytes >= 4096 * 512 * 4
    assert f"{line_of('seen.append(')} `seen.append(hidden.square().mean())` keeps a tensor of every step" in leak.what


@pytest.mark.parametrize(("function", "num_steps"), [("clean", 3), ("lingering", 2)])
def test_a_clean_loop_and_too_few_steps_say_nothing(function: str, num_steps: int) -> None:
    assert advice(function, num_steps) == []


def test_it_is_nothing_to_put_on_a_model() -> None:
    with pytest.raises(ApplyError, match="suggestion"):
        KeptAlive().apply(Session(model=torch.nn.Linear(1, 1), optimizers=[]), [])
