"""What `tightfit run` does on the card of this machine is what plain Python does there. Skips where there is none."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
ENVIRONMENT = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no card that torch can use on this machine"),
]


def run(*words: str) -> tuple[dict[str, Any], str]:
    """The line of JSON that a script has printed, and what was said beside it."""
    done = subprocess.run(
        [sys.executable, *words], cwd=HERE, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout[done.stdout.index("{") :]), done.stderr


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return run("uneven_lengths.py")[0]


def assert_the_same(found: dict[str, Any], plain: dict[str, Any], rel: float) -> None:
    assert found["losses"] == pytest.approx(plain["losses"], rel=rel)
    assert found["weights"] == pytest.approx(plain["weights"], rel=max(rel, 1e-9))


def test_a_guarded_run_trains_the_same(plain: dict[str, Any]) -> None:
    found, _ = run("-m", "tightfit", "run", "--guard", "uneven_lengths.py")
    assert_the_same(found, plain, 0.0)


def test_a_budget_holds_and_long_batches_are_run_with_the_fallback(plain: dict[str, Any], tmp_path: Path) -> None:
    budget = (plain["in_use"] - plain["reserved"]) + int(0.6 * plain["reserved"])
    plan = str(tmp_path / "small.json")
    words = ("plan", "uneven_lengths.py", "--steps", "5", "--used", "0", "--budget", f"{budget >> 20}MiB", "-o", plan)
    done = subprocess.run(
        [sys.executable, "-m", "tightfit", *words], cwd=HERE, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    limit = ("--guard", "--budget", f"{budget >> 20}MiB")
    found, said = run("-m", "tightfit", "run", *limit, "--fallback", plan, "uneven_lengths.py")
    assert_the_same(found, plain, 1e-4)
    assert found["in_use"] <= budget
    assert " out of memory, " in said


def test_one_process_over_nccl_trains_the_same(plain: dict[str, Any]) -> None:
    found, _ = run("-m", "tightfit", "run", "--gpus", "1", "uneven_lengths.py")
    assert_the_same(found, plain, 1e-6)


def test_more_processes_than_cards_are_refused() -> None:
    num_gpus = str(torch.cuda.device_count() + 1)
    command = [sys.executable, "-m", "tightfit", "run", "--gpus", num_gpus, "uneven_lengths.py"]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
    assert done.returncode in (1, 2, 3)
    assert len(done.stderr.strip().splitlines()) <= 3


@pytest.mark.parametrize("cache", ["static", "offloaded"])
def test_another_cache_makes_the_same_tokens(cache: str) -> None:
    pytest.importorskip("transformers")
    plain, _ = run("new_tokens.py")
    found, _ = run("-m", "tightfit", "run", "--cache", cache, "new_tokens.py")
    assert found["tokens"] == plain["tokens"]
    if cache == "offloaded":
        assert found["allocated"] < plain["allocated"]


def test_the_peak_of_generate_is_that_of_the_card() -> None:
    pytest.importorskip("transformers")
    plain, _ = run("new_tokens.py")
    card = torch.cuda.get_device_name()
    found, _ = run("-m", "tightfit", "estimate", "new_tokens.py", "--device", card, "--json")
    assert found["peak"]["allocated_bytes"] == pytest.approx(plain["allocated"], rel=0.005)
