"""`import tightfit` and `tightfit --help` are instant, and load none of the heavy packages."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.sampled import every_second

HEAVY = {"torch", "transformers", "numpy", "rich", "cyclopts", "jinja2"}
MEASURE = """
import sys, time
before = time.process_time()
import tightfit
seconds = time.process_time() - before
import json
print(json.dumps({"seconds": seconds, "modules": sorted({name.partition(".")[0] for name in sys.modules})}))
"""


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_import_takes_under_150_ms_and_loads_nothing_heavy() -> None:
    answers = [json.loads(python(MEASURE)) for _ in range(5)]
    assert min(answer["seconds"] for answer in answers) < 0.150
    assert HEAVY.isdisjoint(answers[0]["modules"])


@pytest.mark.parametrize(
    "name",
    [
        *("Device", "Tape", "Estimate", "Plan", "TightfitError"),
        *("find_device", "record", "replay", "estimate"),
    ],
)
def test_no_public_name_loads_torch_or_what_only_pages_need(name: str) -> None:
    code = f"import tightfit, sys; tightfit.{name}; print(*(name in sys.modules for name in ('torch', 'transformers', 'jinja2')))"
    assert python(code).split() == ["False", "False", "False"]


SCRIPT = """
import torch
model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(4096, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_plan_is_made_without_torch(tmp_path: Path) -> None:
    """What a plan is made of is traced in children and worked out from tapes: options, the solver, the proof, the advice, the text."""
    (tmp_path / "train.py").write_text(SCRIPT)
    code = f"""
import sys, tightfit
from tightfit.techniques.registry import techniques
plan = tightfit.plan({str(tmp_path / "train.py")!r}, "RTX 4090", budget="770MiB")
assert len(techniques()) > 20 and plan.choices and plan.explain() and plan.to_json()
print("torch" in sys.modules)
"""
    assert python(code).split()[-1] == "False"


@pytest.mark.parametrize("arguments", [["--help"], ["report", "--help"], ["report", "none.pickle"]])
def test_a_command_that_writes_no_page_does_without_jinja2(arguments: list[str]) -> None:
    code = f"import sys; from tightfit.cli.main import run; run({arguments}); print('jinja2' in sys.modules)"
    assert python(code).split()[-1] == "False"


def _processor_seconds(command: list[str]) -> float:
    """The least of three runs, which have to answer and to say nothing else; what else a machine does is not counted."""
    took = []
    for _ in range(3):
        before = os.times()
        answer = subprocess.run(command, capture_output=True, text=True, check=True)
        after = os.times()
        took.append(after.children_user + after.children_system - before.children_user - before.children_system)
        assert answer.stdout
        assert answer.stderr == ""
    return min(took)


@pytest.fixture(scope="module")
def seconds_of_the_libraries() -> float:
    """Of an interpreter that imports what any command line of this kind imports, on this machine."""
    code = "import cyclopts, cyclopts.help, rich.console, rich.table, rich.panel; print('imported')"
    return _processor_seconds([sys.executable, "-c", code])


@pytest.mark.parametrize(
    "arguments", every_second([["--help"], ["estimate", "--help"], ["--version"], ["replay", "--help"]])
)
def test_help_comes_at_once(arguments: list[str], seconds_of_the_libraries: float) -> None:
    """Half a second on the machines that this was written on, where the libraries alone take 0.2 s."""
    program = str(Path(sys.executable).with_name("tightfit"))
    assert _processor_seconds([program, *arguments]) < 2.7 * seconds_of_the_libraries


UNINSTALLED = """
import importlib, importlib.metadata, pkgutil
found = importlib.metadata.Distribution.from_name
def from_name(name):
    if name == "tightfit":
        raise importlib.metadata.PackageNotFoundError(name)
    return found(name)
importlib.metadata.Distribution.from_name = from_name
import tightfit.cli
print(*(importlib.import_module(each.name).__name__ for each in pkgutil.walk_packages(tightfit.cli.__path__, "tightfit.cli.")))
"""


def test_a_folder_of_sources_that_is_not_installed_has_all_commands() -> None:
    assert "tightfit.cli.run" in python(UNINSTALLED).split()
