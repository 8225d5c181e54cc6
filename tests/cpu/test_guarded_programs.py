"""Which loops of a program are guarded, and what a loop does that has a `next` of its own. No operator of torch's is needed for it."""

import textwrap
from pathlib import Path

import pytest
from tests.cpu.guarded_scripts import Scripts

from tightfit.guarding.loops.find_loops import GuardedProgram, training_loops

LOOP = """
def fit{0}(model, optimizer, batches):
    for batch in batches:
        model(batch).sum().backward()
        optimizer.step()
"""


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / f"{name.replace('__of__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def guarded(path: Path, folder: Path | None = None) -> set[str]:
    program = GuardedProgram.of(path, folder)
    return {Path(each).stem for each in program.trees if training_loops(program, each)}


def test_what_a_program_imports_from_its_own_folder_is_guarded(tmp_path: Path) -> None:
    write(
        tmp_path,
        package__of____init__="from .early import nothing\n",
        package__of__early=LOOP.format("_early"),
        package__of__train="from .loop import fit\nfrom .parts import other\nfrom package.absolute import fit_more\nfrom . import alone\nimport beside\n",
        package__of__loop=LOOP.format(""),
        package__of__absolute=LOOP.format("_more"),
        package__of__alone=LOOP.format("_alone"),
        package__of__parts__of____init__="from .inner import fit_inner\n",
        package__of__parts__of__inner="from ..sideways import fit_sideways\n" + LOOP.format("_inner"),
        package__of__sideways=LOOP.format("_sideways"),
        package__of__other=LOOP.format("_unused"),
        beside=LOOP.format("_beside"),
    )
    found = guarded(tmp_path / "package" / "train.py", tmp_path)
    assert found == {"early", "loop", "absolute", "alone", "inner", "sideways", "beside"}
    write(tmp_path, script="from package.loop import fit\nfrom beside import *\n")
    # The package's own file is run too.
    assert guarded(tmp_path / "script.py") == {"early", "loop", "beside"}


HEAD = """
import torch
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
seen = []
"""
BODY = """
for number in range(3):
    value = next(number)
    seen.append(value)
    model(torch.full((1, 1), float(value))).sum().backward()
    optimizer.step()
"""
OWN_NEXT = {
    "of the module": "def next(x):\n    return x + 100\n" + BODY,
    "imported by a star": "from mine import *\n" + BODY,
    "of a function": "def train():\n    next = lambda x: x + 100\n" + textwrap.indent(BODY, "    ") + "train()\n",
    "an argument": "def train(next):\n" + textwrap.indent(BODY, "    ") + "train(lambda x: x + 100)\n",
    "of a function around": "def outer(next):\n    def train():\n"
    + textwrap.indent(BODY, "        ")
    + "    train()\nouter(lambda x: x + 100)\n",
    "that is global": "def bind():\n    global next\n    next = lambda x: x + 100\nbind()\n" + BODY,
}


@pytest.mark.parametrize("kind", OWN_NEXT)
def test_a_next_of_the_programs_own_is_called(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = Scripts(tmp_path, capsys, monkeypatch)
    write(tmp_path, mine="def next(x, default=None):\n    return x + 100\n")
    found = scripts.run(scripts.write(HEAD + OWN_NEXT[kind]), names=("seen",))
    assert found.error is None
    assert found.statistics["steps"] == 3
    assert found.values["seen"] == [100, 101, 102]


def test_a_next_of_another_function_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = Scripts(tmp_path, capsys, monkeypatch)
    others = "class Node:\n    def next(self):\n        next = self.after\n        return next\n"
    body = """
from tests.unseen_queue import unseen_queue
calls = unseen_queue()
batches = iter(range(4))
for number in range(3):
    seen.append(next(batches))
    calls.put(1)
    if calls.qsize() == 2:
        raise torch.OutOfMemoryError("CUDA out of memory.")
    model(torch.full((1, 1), float(number))).sum().backward()
    optimizer.step()
"""
    found = scripts.run(scripts.write(HEAD + others + body), names=("seen",))
    assert found.error is None, found.notes
    assert found.values["seen"] == [0, 1, 2]
    assert found.statistics["replays"] == 1
