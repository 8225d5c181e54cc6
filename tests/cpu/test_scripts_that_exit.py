"""A script that leaves by `sys.exit` in its last statement has come to its end; one that leaves before has not."""

from pathlib import Path

import pytest

from tightfit.capture.child_process.last_statement import is_behind_all, is_plainly_behind_all
from tightfit.capture.targets.target_kinds import Script
from tightfit.capture.trace import trace
from tightfit.errors import CaptureError
from tightfit.tape import SpanKind, Tape

_PREDICTS = """
import sys
import torch

model = torch.nn.Linear(8, 8).to("cuda")

def main():
    with torch.no_grad():
        loss = model(torch.randn(4, 8, device="cuda")).sum()
    if {leaves}:
        sys.exit()
    return 0

"""
_TRAINS = """
import torch

model = torch.nn.Linear(8, 8).to("cuda")
optimizer = torch.optim.SGD(model.parameters())
model(torch.randn(4, 8, device="cuda")).sum().backward()
optimizer.step()
"""


def _tape(folder: Path, program: str) -> Tape:
    path = folder / "answer.py"
    path.write_text(program)
    return trace(Script(path=str(path), arguments=()), label="answer.py", device="A100-40GB").tape


@pytest.mark.parametrize(
    "program",
    [
        _PREDICTS.format(leaves="False") + 'if __name__ == "__main__":\n    sys.exit(main())\n',
        _TRAINS + "raise SystemExit\n",
    ],
    ids=["predicts", "trains"],
)
def test_it_has_its_steps(program: str, tmp_path: Path) -> None:
    assert (_tape(tmp_path, program).spans.kind == SpanKind.STEP).sum() == 1


@pytest.mark.parametrize(
    "end", ["sys.exit(main())\n", "main()\nif model is not None:\n    exit(0)\nprint(1)\n"], ids=["inside", "between"]
)
def test_an_earlier_exit_is_said(end: str, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="exited before its steps were complete"):
        _tape(tmp_path, _PREDICTS.format(leaves=end.startswith("sys")) + end)


@pytest.mark.parametrize(
    ("source", "is_last"),
    [
        ("import sys\nsys.exit()\n", True),
        ("import sys\nif True:\n    sys.exit(0)\n", True),
        ("import sys\ntry:\n    sys.exit(\n        None\n    )\nfinally:\n    pass\n", True),
        ("quit()\n", True),
        ("import sys\nsys.exit(1)\n", False),
        ("import sys\nif True:\n    sys.exit()\nx = 1\n", False),
        ("import sys\nif True:\n    sys.exit()\nelse:\n    x = 1\n", False),
        ("import sys\ndef leave():\n    sys.exit()\nleave()\n", False),
    ],
)
def test_the_last_statement_is_told_from_others(source: str, is_last: bool, tmp_path: Path) -> None:
    path = tmp_path / "ends.py"
    path.write_text(source)
    with pytest.raises(SystemExit) as ended:
        exec(compile(source, str(path), "exec"), {"quit": _quit})
    assert is_behind_all(ended.value, str(path)) is is_last


@pytest.mark.parametrize(
    ("source", "is_plain"),
    [
        ("import sys\nsys.exit(7)\n", True),
        ("raise SystemExit('failed')\n", True),
        ("import sys\nif True:\n    sys.exit(7)\nelse:\n    x = 1\n", False),
        ("import sys\ncode = 7\nsys.exit(code)\n", False),
        ("import sys\nsys.exit(7)\nx = 1\n", False),
    ],
)
def test_an_error_at_the_end_leaves_nothing_behind(source: str, is_plain: bool, tmp_path: Path) -> None:
    path = tmp_path / "ends.py"
    path.write_text(source)
    with pytest.raises(SystemExit) as ended:
        exec(compile(source, str(path), "exec"), {})
    assert is_plainly_behind_all(ended.value, str(path)) is is_plain


def test_a_script_that_ends_with_an_error_was_seen_to_its_end(tmp_path: Path) -> None:
    coverage = _tape(
        tmp_path,
        "import sys\n"
        + _TRAINS.replace("model(t", "for _ in range(9):\n    model(t").replace("optimizer.s", "    optimizer.s")
        + "sys.exit(7)\n",
    ).coverage
    assert (coverage.stopped, coverage.not_reached) == ("", ())


def _quit() -> None:
    # As of a library for command lines.
    raise SystemExit(0)
