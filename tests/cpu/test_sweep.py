"""A table over values of parameters and options: each combination is a row, and one that fails is a row with its reason."""

import json
from pathlib import Path
from typing import Any

import pytest

from tightfit.capture.targets.target_kinds import GeneratorFunction, HuggingFaceConfig, Script
from tightfit.cli.main import run
from tightfit.errors import UsageError
from tightfit.fit.combinations import Axis, combinations, with_values

WORKLOAD = """\
import argparse, sys
import torch


def workload(batch_size=8, dtype="float32", sizes=()):
    layer = torch.nn.Linear(1024, 1024, dtype=getattr(torch, dtype)).cuda()
    for _ in range(3):
        layer(torch.ones(batch_size, 1024, dtype=layer.weight.dtype, device="cuda")).sum().backward()
        yield


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--unused", type=int)
    for _ in workload(parser.parse_args().batch_size):
        pass
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "work.py").write_text(WORKLOAD)
    monkeypatch.chdir(tmp_path)


def rows_of(capsys: pytest.CaptureFixture[str], *words: str, code: int) -> list[dict[str, Any]]:
    assert run(["estimate", *words, "--device", "RTX 4060", "--steps", "1", "--json"]) == code
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_every_combination_of_parameters_is_a_row_and_one_that_fails_says_why(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    words = ("--sweep", "batch_size=1024,9000000", "--sweep", "dtype=bfloat16,nosuch", "--redact")
    rows = rows_of(capsys, f"{tmp_path}/work.py:workload", *words, code=3)
    assert str(tmp_path) not in json.dumps(rows)
    assert [tuple(row["sweep"].values()) for row in rows] == [
        (1024, "bfloat16"),
        (1024, "nosuch"),
        (9000000, "bfloat16"),
        (9000000, "nosuch"),
    ]
    assert [row["fits"] for row in rows] == [True, None, False, None]
    assert rows[1]["error"].startswith("~/work.py:workload raised AttributeError at work.py:6: ")
    assert rows[1]["exit_code"] == 3
    # Input and output of 9,000,000 rows in two bytes each, and nothing of the dtype of the default.
    assert 2 * 9000000 * 2048 < rows[2]["peak"]["allocated_bytes"] < 4 * 9000000 * 2048


def test_rows_are_judged_with_the_margin_that_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("work.py:workload", "--sweep", "batch_size=1024")
    (row,) = rows_of(capsys, *words, code=0)
    peak, capacity = row["peak"], row["device"]["capacity_bytes"]
    # Between the likely peak and the upper end of its range.
    limit = capacity - (peak["device_bytes"] + peak["device_high_bytes"]) // 2
    (likely,) = rows_of(capsys, *words, "--used", f"{limit}B", code=0)
    (safe,) = rows_of(capsys, *words, "--used", f"{limit}B", "--margin", "safe", code=1)
    assert (likely["margin"], likely["fits"], safe["margin"], safe["fits"]) == ("likely", True, "safe", False)


def test_an_option_of_a_script_and_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["estimate", "work.py", "--device", "RTX 4060", "--used", "1GiB", "--sweep", "batch_size=1024,8192"]
    assert run([*words, "--steps", "1", "--", "--unused", "3"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    lines = said.out.splitlines()
    assert lines[2].split()[:2] == ["batch_size", "peak"]
    first, second = (line.split() for line in lines[3:5])
    assert (first[0], second[0], first[7]) == ("1024", "8192", "yes")
    assert float(first[1]) + 7 < float(second[1])
    assert "other processes hold 1.00 GiB" in said.out


def test_an_option_that_makes_no_difference_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    run(["estimate", "work.py", "--device", "RTX 4060", "--sweep", "unused=1,2", "--steps", "1"])
    assert capsys.readouterr().err == "tightfit: unused makes no difference to the memory: does work.py use it?\n"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--sweep", "batch_size"], "--sweep batch_size: write NAME=VALUE,VALUE, such as batch_size=8,16,32"),
        (["--sweep", "batch_size=8,,9"], "--sweep batch_size=8,,9: write NAME=VALUE,VALUE"),
        (["--sweep", "batch_size=8,8"], "--sweep batch_size=8,8: a value stands there twice"),
        (["--sweep", "a-b=1", "--sweep", "a_b=2"], "--sweep a_b: it is given twice"),
        (["--sweep", f"a={','.join(map(str, range(300)))}"], "--sweep: more than 256 combinations"),
        (["--sweep", "a=1", "--save-tape", "run.npz"], "--sweep traces a workload once for each row"),
        (["--sweep", "a=1", "--batch-size", "3"], "batch_size: only for a Hugging Face config"),
    ],
)
def test_a_wrong_sweep_is_one_line(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["estimate", "work.py", "--device", "RTX 4060", *words]) == 2
    assert capsys.readouterr().err.startswith(f"tightfit: {line}")


@pytest.mark.parametrize("words", [("depth=3",), ("batch_size=many",), ("gradient_checkpointing=maybe",)])
def test_a_config_has_its_own_options(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["estimate", "gpt2", "--device", "RTX 4060", "--sweep", *words]) == 2
    assert capsys.readouterr().err.startswith(f"tightfit: --sweep {words[0].partition('=')[0]}: ")


def test_how_values_reach_each_kind_of_target() -> None:
    values = {"batch_size": "8", "dtype": "float16", "fast": "true", "sizes": "[1, 2]"}
    function = GeneratorFunction(location="work.py", function="workload", parameters={"batch_size": 2, "x": None})
    assert with_values(function, values)["parameters"] == [
        *("batch_size=8", "x=None", "dtype='float16'", "fast=True", "sizes=[1, 2]")
    ]
    config = HuggingFaceConfig(source="gpt2", options={"batch_size": 2, "task": "causal-lm"})
    assert with_values(config, {"batch-size": "8"})["options"] == {"batch_size": 8, "task": "causal-lm"}
    for given, changed in (
        ((), ("--batch-size", "8")),
        (("--batch-size", "2", "-v"), ("--batch-size", "8", "-v")),
        (("--batch_size=2",), ("--batch_size=8",)),
    ):
        script = Script(path="work.py", arguments=given)
        assert tuple(with_values(script, {"batch_size": "8"})["arguments"]) == changed


def test_commas_inside_of_brackets_and_quotes_belong_to_a_value() -> None:
    axis = Axis.parse("sizes=[1, 2],(3, 4),'a,b',5")
    assert axis.values == ("[1, 2]", "(3, 4)", "'a,b'", "5")
    assert combinations([axis, Axis.parse("n=1")])[0] == {"sizes": "[1, 2]", "n": "1"}
    with pytest.raises(UsageError, match="write NAME=VALUE"):
        Axis.parse("=3")
