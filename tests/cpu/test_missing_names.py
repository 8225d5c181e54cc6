"""A torch without a name that we use is one line, exit code 3: where a trace begins, and where a user's own process is about to be hooked."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tightfit.capture.targets.target_kinds import GeneratorFunction
from tightfit.capture.trace import Preparation, trace
from tightfit.cli.main import run
from tightfit.errors import UnsupportedTorch

# Each is taken at the head of one of our modules, by the child or by what puts a plan on a program. Python runs this file when it starts.
FOR_A_TRACE = "import sys, torch\ndel sys.modules['torch.optim.optimizer']._foreach_supported_types\n"
FOR_A_PLAN = "import torch.utils.checkpoint\ndel torch.utils.checkpoint._StopRecomputationError\n"
SCRIPT = "import torch\n\n\ndef workload():\n    yield torch.ones(3, device='cuda').sum()\n"
IN_A_PROCESS = """
import sys
import tightfit
try:
    {what}
except tightfit.TightfitError as error:
    print(type(error).__name__, error)
"""


@pytest.fixture
def without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, traces_import_libraries_themselves: None) -> Path:
    """A working folder with a script, and all processes that are started from now on lack the name of `FOR_A_TRACE` or `FOR_A_PLAN`."""
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "sitecustomize.py"


def test_a_trace_says_which_name_is_missing_and_does_not_blame_the_script(
    without: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    without.write_text(FOR_A_TRACE)
    assert run(["estimate", "script.py:workload", "--device", "4090"]) == 3
    out, err = capfd.readouterr()
    (line,) = err.splitlines()
    assert out == ""
    assert line.startswith(
        f"tightfit: torch {torch.__version__} has no torch.optim.optimizer._foreach_supported_types, which tightfit needs to"
    )
    assert "are known to work: pip install 'torch>=" in line
    assert "script.py" not in line


@pytest.mark.slow
def test_a_trace_with_a_plan_says_it_too(without: Path) -> None:
    without.write_text(FOR_A_PLAN)
    preparation = Preparation(function="tightfit.runtime.run_script:prepare", argument={"choices": []})
    target = GeneratorFunction(location="script.py", function="workload", parameters={})
    with pytest.raises(
        UnsupportedTorch, match=r"has no torch\.utils\.checkpoint\._StopRecomputationError, which tightfit"
    ):
        trace(target, label="script.py", device="RTX 4090", preparation=preparation)


@pytest.mark.parametrize(
    "what",
    ["tightfit.apply", pytest.param("tightfit.record('run.pickle').__enter__()", marks=pytest.mark.slow)],
    ids=["apply", "record"],
)
def test_a_users_process_is_told_before_anything_is_replaced(without: Path, what: str) -> None:
    without.write_text(FOR_A_PLAN)
    done = subprocess.run(
        [sys.executable, "-c", IN_A_PROCESS.format(what=what)], capture_output=True, text=True, check=True
    )
    (line,) = done.stdout.splitlines()
    assert line.startswith(
        f"UnsupportedTorch torch {torch.__version__} has no torch.utils.checkpoint._StopRecomputationError, which tightfit needs to"
    )
