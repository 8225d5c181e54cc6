"""Libraries that are imported before the virtual card is there are what they are in a program that is traced."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from tightfit.capture.child_process import trace_server
from tightfit.capture.collectives.world import World
from tightfit.capture.targets import imported_before
from tightfit.capture.targets.library_imports import LIBRARIES, library_imports
from tightfit.capture.targets.target_kinds import GeneratorFunction, Script
from tightfit.fit import capture
from tightfit.tape.allocated_bytes import allocated_bytes

# Many traces, of which each commit tries a half.
pytestmark = pytest.mark.by_turns(2)

_IMPORTS = """
import accelerate, lightning
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM, Trainer
"""

# What the modules of the libraries have: the values of what is simple, where functions and classes are from, and whether a function of torch's is the
# virtual card's.
_NAMES = """
import json, sys, types
from pathlib import Path
from tightfit.capture.child_process import trace_server
from tightfit.capture.processes import fork_server
from tightfit.capture.targets.library_imports import library_imports
names = trace_server.preloaded(is_huggingface=False, program=Path(sys.argv[2]))
is_before = sys.argv[1] == "before"
fork_server._import([n for n in names if is_before or n in trace_server.PRELOADED], set())
from tightfit.capture.child_process.capture_session import CaptureSession
from tightfit.capture.targets import imported_before
session = CaptureSession("RTX 4090", 3, by_yield=False)
imported_before.exchange()
if not is_before:
    for statement in library_imports(Path(sys.argv[2])):
        exec(statement, {})
found = {}
for name, module in sorted(sys.modules.items()):
    if isinstance(module, types.ModuleType) and imported_before._is_of_library(name):
        for key, value in list(vars(module).items()):
            if isinstance(value, imported_before._EXCHANGED):
                found[f"{name}.{key}"] = f"{value.__module__}.{value.__qualname__}"
            elif isinstance(value, bool | int | float | str | None):
                found[f"{name}.{key}"] = repr(value)
            elif type(value) in (tuple, list, set, frozenset) and all(isinstance(each, str) for each in value):
                found[f"{name}.{key}"] = repr(sorted(value))
            else:
                found[f"{name}.{key}"] = type(value).__name__
print(json.dumps(found))
"""
# Drawn anew by each process.
_DRAWN = "SESSION_ID"


def test_they_are_the_same_with_a_card_and_without_one(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(_IMPORTS)
    found = []
    for when in ("before", "after"):
        run = subprocess.run(
            [sys.executable, "-c", _NAMES, when, str(program)],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": "0"},
            check=True,
        )
        names = json.loads(run.stdout.splitlines()[-1])
        found.append({key: value for key, value in names.items() if not key.endswith(_DRAWN)})
    before, after = found
    assert {name.partition(".")[0] for name in before} == LIBRARIES
    assert before.keys() == after.keys()
    assert {key: (value, after[key]) for key, value in before.items() if after[key] != value} == {}


_HEAD = '"""What it does."""\nfrom __future__ import annotations\nimport os, torch\nfrom torch import nn\n'


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (_HEAD + "from transformers import A, B\nimport numpy as np\nimport peft\n", 2),
        (_HEAD + "import transformers, accelerate\n", 1),
        # What comes first may change what they are.
        (_HEAD + "os.environ['A'] = '1'\nimport transformers\n", 0),
        (_HEAD + "import peft\ntorch.nn.Linear = None\nimport transformers\n", 1),
        (_HEAD + "import unsloth\nimport transformers\n", 0),
        (_HEAD + "import unsloth, transformers\n", 0),
        (_HEAD + "from . import transformers\n", 0),
        (_HEAD + "if True:\n    import transformers\n", 0),
        (_HEAD + "import diffusers\nimport transformers\n", 0),
        (_HEAD + "from torch.utils.tensorboard import SummaryWriter\nimport transformers\n", 0),
        (_HEAD + "from torch.utils import tensorboard\nimport transformers\n", 0),
        # The program's own.
        (_HEAD + "import numbers\nimport transformers\n", 0),
        ("import transformers\ndef f(:\n", 0),
        ("import transformers\0", 0),
    ],
)
def test_statements_are_taken_up_to_the_first_that_may_change_something(tmp_path: Path, text: str, found: int) -> None:
    (tmp_path / "numbers.py").write_text("")
    (tmp_path / "train.py").write_text(text)
    assert len(library_imports(tmp_path / "train.py")) == found


def test_a_folder_of_that_name_where_the_command_is_run_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "train.py").write_text("import transformers\n")
    monkeypatch.chdir(tmp_path)
    assert library_imports(Path("program/train.py"))
    (tmp_path / "transformers").mkdir()
    assert library_imports(Path("program/train.py")) == ()


_CLONE = """
import torch
def train():
    model = torch.nn.Linear(4, 4).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(100_000):
        model(torch.randn(2, 4, device="cuda")).sum().backward()
        optimizer.step()
    after = torch.zeros(1 << 28, device="cuda")
"""


@pytest.mark.usefixtures("traces_import_libraries_themselves")
def test_a_clone_of_a_library_is_the_programs_own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loops are left, and what comes after them is seen."""
    for folder in ("clones/peft", "program"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "clones/peft/__init__.py").write_text(_CLONE)
    (tmp_path / "program/train.py").write_text("import torch\nimport peft\npeft.train()\n")
    monkeypatch.syspath_prepend(str(tmp_path / "clones"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "clones"), prepend=":")
    found = capture(str(tmp_path / "program/train.py"), device="RTX 4090")
    assert found.coverage.stopped == ""
    assert int(allocated_bytes(found).max()) > 4 << 28


def test_a_server_in_which_code_of_the_users_was_imported_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever has imported it: in a trace it would be compiled with checks in its loops."""
    own = types.ModuleType("own")
    own.__file__ = str(tmp_path / "own.py")
    monkeypatch.setitem(sys.modules, "own", own)
    with pytest.raises(SystemExit):
        imported_before.note()


def test_a_file_that_is_not_there_has_none(tmp_path: Path) -> None:
    assert library_imports(tmp_path / "train.py") == ()


def test_none_are_taken_where_another_library_asks_for_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bitsandbytes.py").write_text("")
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "train.py").write_text("import transformers\n")
    assert library_imports(tmp_path / "program" / "train.py")
    monkeypatch.syspath_prepend(tmp_path)
    assert library_imports(tmp_path / "program" / "train.py") == ()


def test_programs_that_are_packages_or_one_of_many_processes_import_them_themselves() -> None:
    world = World(num_ranks=2)
    script = Script(path="train.py", arguments=())
    assert trace_server.program_of(script, None) == Path("train.py")
    assert trace_server.program_of(script, {"num_ranks": world.num_ranks}) is None
    assert trace_server.program_of(Script(path="a/train.py", arguments=(), module="a.train"), None) is None
    assert trace_server.program_of(GeneratorFunction(location="train.py", function="f", parameters={}), None)
    assert trace_server.program_of(GeneratorFunction(location="a.train", function="f", parameters={}), None) is None
