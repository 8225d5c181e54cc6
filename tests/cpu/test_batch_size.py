"""The largest batch of a workload: what sets it in each kind of target, and a search from beginning to end."""

import json
from pathlib import Path

import pytest
from tests.cpu import micro_batch_models as models

from tightfit.capture.targets.target_kinds import GeneratorFunction, HuggingFaceConfig, Script
from tightfit.cli.main import app
from tightfit.errors import UsageError
from tightfit.fit import batch_size
from tightfit.fit.batch_size import FIRST_SIZE, size_now, with_size


@pytest.mark.parametrize(
    ("arguments", "size", "changed"),
    [
        (("--epochs", "1", "--batch-size", "16"), 16, ("--epochs", "1", "--batch-size", "64")),
        (("--batch-size=4", "--fast"), 4, ("--batch-size=64", "--fast")),
        (("--fast",), FIRST_SIZE, ("--fast", "--batch-size", "64")),
    ],
)
def test_an_option_of_a_script(arguments: tuple[str, ...], size: int, changed: tuple[str, ...]) -> None:
    script = Script(path="train.py", arguments=arguments)
    assert size_now(script, "batch-size") == size_now(script, "--batch-size") == size
    assert with_size(script, "batch-size", 64) == Script(path="train.py", arguments=changed)


@pytest.mark.parametrize(
    ("text", "given", "changed"),
    [
        ("import typer\ndef main(batch_size: int = 8): ...", ("--fast",), ("--fast", "--batch-size", "64")),
        ("import hydra\nfrom omegaconf import DictConfig", ("lr=1",), ("lr=1", "batch_size=64")),
        ("from hydra import main", ("batch_size=4", "lr=1"), ("batch_size=64", "lr=1")),
    ],
)
def test_an_option_that_is_made_of_a_name(
    tmp_path: Path, text: str, given: tuple[str, ...], changed: tuple[str, ...]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    assert with_size(Script(path=str(script), arguments=given), "batch_size", 64).arguments == changed


@pytest.mark.parametrize("written", ["--batch-size", "--batch_size"])
@pytest.mark.parametrize("named", ["batch_size", "batch-size", "--batch-size"])
def test_an_option_is_written_as_the_script_has_it(tmp_path: Path, written: str, named: str) -> None:
    path = tmp_path / "train.py"
    path.write_text(f"parser.add_argument('{written}', type=int, default=8)")
    assert with_size(Script(path=str(path), arguments=()), named, 64).arguments == (written, "64")
    given = Script(path="train.py", arguments=(f"{written}=4",))
    assert size_now(given, named) == 4
    assert with_size(given, named, 64).arguments == (f"{written}=64",)


def test_a_parameter_of_a_function_and_a_config() -> None:
    function = GeneratorFunction(location="train.py", function="workload", parameters={"batch": 3, "width": 5})
    assert size_now(function, "batch") == 3
    assert with_size(function, "batch", 7).parameters == {"batch": 7, "width": 5}
    config = HuggingFaceConfig(source="gpt2", options={"sequence_length": 128})
    assert size_now(config, "batch_size") == 1
    assert with_size(config, "batch_size", 7).options == {"sequence_length": 128, "batch_size": 7}
    with pytest.raises(UsageError, match="it is batch_size that is searched"):
        size_now(config, "sequence_length")
    with pytest.raises(UsageError, match="no size of a batch"):
        size_now(GeneratorFunction(location="train.py", function="workload", parameters={"batch": "many"}), "batch")
    with pytest.raises(UsageError, match="at least one example"):
        size_now(GeneratorFunction(location="train.py", function="workload", parameters={"batch": 0}), "batch")


def test_a_search_finds_a_size_that_fits_and_one_that_does_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_size, "MAX_TRACES", 3)
    monkeypatch.setattr(batch_size, "MAX_PLANS", 0)
    target = f"{models.__file__}:large"
    words = ["--budget", "2GiB", "-p", "batch=128", "--search", "batch", "--steps", "1", "--json"]
    assert app(["plan", target, "--device", "RTX 4090", *words], result_action="return_value") == 0
    found = json.loads(capsys.readouterr().out)
    plain = found["plain"]
    assert plain["device_high_bytes"] <= 2 << 30
    assert plain["size"] < found["plain_too_large"] <= 1.2 * plain["size"]
    assert found["fastest"]["seconds_per_sample"] <= 1.01 * plain["seconds_per_sample"]
    assert found["planned"] is None
    assert len(found["tried"]) <= 5


FEW_EXAMPLES = """
import argparse, torch
from torch.utils.data import DataLoader, TensorDataset
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
size = parser.parse_args().batch_size
loader = DataLoader(TensorDataset(torch.ones(40, 4)), batch_size=size, shuffle=True, drop_last=True)
model = torch.nn.Linear(4, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    for (rows,) in loader:
        model(rows.cuda()).sum().backward()
        optimizer.step()
"""


def test_no_size_larger_than_the_data_set_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(FEW_EXAMPLES)
    words = ["--search", "batch-size", "--steps", "1", "--json"]
    assert app(["plan", "train.py", "--device", "RTX 4090", *words], result_action="return_value") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_examples"] == found["plain"]["size"] == 40
    assert max(row["size"] for row in found["tried"]) == 40
    assert (found["failed"], found["planned"], found["plain_too_large"]) == ([], None, None)


def test_an_interrupted_search_gives_the_sizes_so_far(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(batch_size, "MAX_TRACES", 1)
    monkeypatch.setattr(batch_size.Search, "run", interrupted)
    words = ["--search", "batch", "--steps", "1", "--budget", "20GiB", "-p", "batch=4"]
    assert app(["plan", f"{models.__file__}:large", "--device", "RTX 4090", *words], result_action="return_value") == 0
    said = capsys.readouterr().out
    assert said.startswith("batch 4 is the largest that was found to fit 20.00 GiB")
    assert "the search was interrupted: this is the best so far" in said


def test_a_search_writes_no_plan(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="plan again with the one you choose"):
        app(
            ["plan", f"{models.__file__}:large", "--device", "RTX 4090", "--search", "batch", "-o", "plan.json"],
            result_action="return_value",
        )


def test_a_size_that_the_program_does_not_use_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (
        "import torch\nmodel = torch.nn.Linear(4, 4).cuda()\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    )
    text += "while True:\n    model(torch.ones(8, 4).cuda()).sum().backward()\n    optimizer.step()\n"
    Path("train.py").write_text(text)
    words = ["plan", "train.py", "--device", "RTX 4090", "--search", "batch", "--steps", "1"]
    with pytest.raises(UsageError, match=r"batch: 8 and 1024 need the same memory and time, so train\.py does not use"):
        app(words, result_action="return_value")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--search", "batch"], "--search finds batch sizes and proves no plan: it takes no --no-prove"),
        (["--gpus", "8"], "--gpus goes with --budget, --json and what is traced"),
    ],
)
def test_what_proves_no_plan_takes_no_no_prove(words: list[str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        app(["plan", "gpt2", "--device", "RTX 4090", "--no-prove", *words], result_action="return_value")
