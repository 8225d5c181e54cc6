"""A script that catches every error around its step goes on after a refusal of ours: `tightfit run` and a trace end with the refusal nevertheless."""

import sys
from pathlib import Path

import pytest
from tests.cpu.applied import choice, plan_of

from tightfit.cli.main import run

# The plan is for a Net of 3 blocks.
SWALLOWING = """\
import sys
from tests.cpu.applied import *

model = Net({num_blocks})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    try:
        model(torch.zeros(BATCH, WIDTH)).sum().backward()
        optimizer.step()
    except Exception as error:
        print("skipped", file=sys.stderr)
{end}
"""
REFUSAL = "the plan is for a Net of 2,154 parameters, and this one has 2,722; make a plan for it"


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.parametrize(
    "end", ["", "sys.exit(0)", "raise ValueError('no steps were done')", "raise SystemExit('bye')"]
)
def test_a_run_ends_with_what_the_script_swallowed(end: str, capfd: pytest.CaptureFixture[str]) -> None:
    plan_of().save("plan.json")
    Path("train.py").write_text(SWALLOWING.format(end=end, num_blocks=4))
    assert run(["run", "--plan", "plan.json", "train.py"]) == 3
    said = capfd.readouterr().err.splitlines()
    assert said.count("skipped") == 2
    assert said[-1] == f"tightfit: {REFUSAL}"


def test_a_refusal_that_the_script_makes_another_error_of_is_told_too(capfd: pytest.CaptureFixture[str]) -> None:
    plan_of().save("plan.json")
    text = SWALLOWING.format(end="", num_blocks=4).replace(
        'print("skipped", file=sys.stderr)', "raise RuntimeError('mine')"
    )
    Path("train.py").write_text(text)
    assert run(["run", "--plan", "plan.json", "train.py"]) == 3
    assert capfd.readouterr().err.splitlines()[-1] == f"tightfit: {REFUSAL}"


def test_what_an_earlier_run_refused_is_forgotten(capfd: pytest.CaptureFixture[str]) -> None:
    plan_of().save("plan.json")
    Path("train.py").write_text(SWALLOWING.format(end="", num_blocks=4))
    assert run(["run", "--plan", "plan.json", "train.py"]) == 3
    Path("train.py").write_text(
        "from tests.cpu.applied import *\nmodel, optimizer = made()\ntrain(model, optimizer, range(1))\n"
    )
    assert run(["run", "--plan", "plan.json", "train.py"]) == 0
    assert capfd.readouterr().err


def test_a_trace_ends_with_what_the_script_swallowed(capfd: pytest.CaptureFixture[str]) -> None:
    """And says which technique it was, so that a plan is made without it."""
    plan_of([choice("checkpointing", "Net.layers.7")]).save("plan.json")
    text = SWALLOWING.format(end="", num_blocks=3)
    Path("train.py").write_text(text)
    assert run(["run", "--virtual", "--plan", "plan.json", "train.py"]) == 3
    assert capfd.readouterr().err == (
        "tightfit: checkpointing: the plan names Net.layers.7, which this Net does not have; make a plan for this model\n"
    )


READING = """\
from tests.cpu.applied import *

model = Net(3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(BATCH, WIDTH)).sum().backward()
    # No operator that is answered without the elements, which are made then.
    norms = [(0.5 * parameter.grad).norm() for parameter in model.parameters()]
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_gradient_that_is_made_for_a_reader_is_no_refusal(capfd: pytest.CaptureFixture[str]) -> None:
    plan_of([choice("update_in_backward", "optimizer", kernel="same", clips=False)]).save("plan.json")
    Path("train.py").write_text(READING)
    assert run(["run", "--plan", "plan.json", "train.py"]) == 0, capfd.readouterr().err
    assert "gradients are kept" in capfd.readouterr().err
