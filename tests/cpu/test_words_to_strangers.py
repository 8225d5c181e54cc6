"""What a program asks of its surroundings, and is not given in a trace, is said: standard input, arguments of a module, the folder that it began in."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tightfit import estimate
from tightfit.cli.main import run
from tightfit.errors import CaptureError, ProgramError, UsageError
from tightfit.fit.card_settings import CardSettings
from tightfit.fit.planning import allowed

STEPS = """
import torch

model = torch.nn.Linear(64, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    model(torch.randn(4, 64, device="cuda")).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("text", ["int(sys.stdin.readline())", "int(input())", "json.load(sys.stdin.buffer)"])
def test_an_error_of_a_program_that_reads_standard_input_says_that_there_is_none(tmp_path: Path, text: str) -> None:
    script = tmp_path / "asks.py"
    script.write_text(f"import json, sys\nsize = {text}\n{STEPS}")
    with pytest.raises(ProgramError) as caught:
        estimate(str(script), "RTX 4090")
    assert str(caught.value).count("a trace has no standard input") == 1


def test_a_program_that_goes_on_without_standard_input_is_told_of_among_the_assumptions(tmp_path: Path) -> None:
    script = tmp_path / "asks.py"
    script.write_text(
        f"import sys\nwords = sys.stdin.read().split()\nassert words == [] and not sys.stdin.isatty()\n{STEPS}"
    )
    (found,) = [each for each in estimate(str(script), "RTX 4090").assumptions if "standard input" in each.what]
    assert found.where.endswith("asks.py:2")


def test_a_file_at_standard_input_is_given_to_each_trace_from_where_it_is_read(tmp_path: Path) -> None:
    script, text = tmp_path / "asks.py", tmp_path / "words.txt"
    text.write_text("head\nsize 64\n")
    script.write_text(
        f"import os, sys\nassert sys.stdin.readline() == 'size 64\\n' and not sys.stdin.read() and not os.read(0, 1)\n{STEPS}"
    )
    own, given = os.dup(0), os.open(text, os.O_RDONLY)
    os.read(given, 5)
    os.dup2(given, 0)
    try:
        for _ in range(2):
            assert not any("standard input" in each.what for each in estimate(str(script), "RTX 4090").assumptions)
    finally:
        os.dup2(own, 0)
        os.close(own)
        os.close(given)


def test_a_module_with_a_function_has_no_arguments_of_ours(tmp_path: Path) -> None:
    script = tmp_path / "parses.py"
    script.write_text(f"import sys\nsize = int(sys.argv[1]) if len(sys.argv) > 1 else 8\n{STEPS}")
    with pytest.raises(UsageError, match="has no function workload"):
        estimate(f"{script}:workload", "RTX 4090")


def test_lines_are_relative_to_the_folder_that_the_program_began_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "nets.py").write_text("def forward(model, x):\n    return model(x)\n")
    steps = STEPS.replace(
        'model(torch.randn(4, 64, device="cuda"))', 'forward(model, torch.randn(4, 64, device="cuda"))'
    )
    change = "import os\nfrom .nets import forward\n\nos.makedirs('runs/1')\nos.chdir('runs/1')\n"
    (tmp_path / "package" / "train.py").write_text(change + steps)
    assert run(["estimate", "-m", "package.train", "--device", "RTX 4090", "--json"]) == 0
    lines = {holder["line"] for holder in json.loads(capsys.readouterr().out)["holders"]}
    assert any(line.startswith("package/nets.py:") for line in lines)
    assert not any(line.startswith(("/", "..")) for line in lines)
    (tmp_path / "package" / "train.py").write_text(change + "raise ValueError('no')\n")
    assert run(["estimate", "-m", "package.train", "--device", "RTX 4090"]) == 3
    assert "raised ValueError at package/train.py:6: no" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"arguments": "--epochs 1"}, r"arguments must be a list of strings, such as \['--epochs', '1'\], not str"),
        ({"arguments": ["--epochs", 1]}, r"arguments must be a list of strings, such as .*: write '1' for 1"),
        (
            {"parameters": {"batch_size": 4}},
            r"parameters must be a list of strings, such as \['batch_size=16'\], not dict",
        ),
    ],
)
def test_what_python_takes_for_a_list_of_texts_and_is_none_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        estimate("train.py", "RTX 4090", **given)


def test_a_few_bytes_are_no_budget() -> None:
    with pytest.raises(UsageError, match="budget=12 is bytes: write budget='12GiB'"):
        CardSettings.of("RTX 4090").budget_bytes(12)


def test_one_word_is_a_list_of_one() -> None:
    assert allowed("lossy", "checkpointing") == allowed(["lossy"], ["checkpointing"])


def test_a_folder_for_post_mortems_is_made_and_one_that_cannot_be_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys\nsys.exit(5)\n")
    folder = tmp_path / "logs"
    command = [sys.executable, "-m", "tightfit", "run", "--guard", "--post-mortems", str(folder), str(script)]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 5
    assert folder.is_dir()
    assert run(["run", "--guard", "--post-mortems", str(tmp_path / "a" / "b"), str(script)]) == 2
    assert "/a/b: No such file or directory" in capsys.readouterr().err


def test_a_program_that_takes_no_step_without_standard_input_is_told_of_it(tmp_path: Path) -> None:
    script = tmp_path / "lines.py"
    lines = "".join(f"    {line}\n" for line in STEPS.strip().splitlines())
    script.write_text(f"import sys\nfor line in sys.stdin:\n{lines}")
    with pytest.raises(CaptureError, match=r"ended without a step: .*; a trace has no standard input: "):
        estimate(str(script), "RTX 4090")
