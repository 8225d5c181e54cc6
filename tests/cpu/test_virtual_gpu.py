"""The virtual GPU answers like CUDA. The checks are in the folder `virtual_gpu`, and run in one process of their own."""

import ast
import json
from pathlib import Path

import pytest
from tests.forked_python import forked_python

from tightfit.cli.main import run

FOLDER = Path(__file__).parent / "virtual_gpu"


def checks() -> list[str]:
    """The names of the checks: functions whose name is a sentence."""
    return [
        node.name
        for path in sorted(FOLDER.glob("checks_*.py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and node.name.count("_") >= 2
    ]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    done = forked_python(str(FOLDER / "worker.py"), cwd=tmp_path_factory.mktemp("checks"), timeout=300)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    said = {line["begins"]: f"the process ended\n{done.stderr[-2000:]}" for line in lines if "begins" in line}
    return said | {line["name"]: line["said"] for line in lines if "name" in line}


@pytest.mark.parametrize("check", checks())
def test_the_card(answers: dict[str, str], check: str) -> None:
    assert answers[check] == "", answers[check]


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (
            "import torch\n\nmodel = torch.nn.Linear(4, 4).to('cuda:1')\n",
            "train.py:3 uses cuda:1, but one GPU is simulated",
        ),
        (
            "import torch\n\ntorch.distributed.init_process_group('nccl', rank=0, world_size=2)\n",
            "train.py:3 joins 2 processes, but one GPU is simulated",
        ),
        (
            "import torch\n\nloss = torch.ones(4096, 64, device='cuda').mean()\n"
            "while loss.item() > 0.1:\n    loss = loss * 1\nwhile True:\n    loss.item()\n",
            "train.py:7: a loop waits for a value that only a real run computes",
        ),
    ],
    ids=["second card", "second process", "endless loop"],
)
def test_what_cannot_be_traced_is_said_in_one_line(
    tmp_path: Path, script: str, said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(script)
    monkeypatch.chdir(tmp_path)
    assert run(["estimate", "train.py", "--device", "RTX 4090", "--json"]) == 3
    out, err = capfd.readouterr()
    assert said in err
    assert err.count("\n") == 1
    assert not out
