"""The markers and the fixture of the pytest plugin, in sessions of their own; and what pytest's start has of it."""

import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

PLUGIN = "tightfit.integrations.pytest_plugin"
TESTS = """
import pytest
import torch

KEPT = []


@pytest.mark.no_leak
def test_clean():
    torch.nn.Linear(64, 64)(torch.ones(8, 64)).sum().backward()


@pytest.mark.no_leak(repeats=7)
@pytest.mark.parametrize("rows", [512])
def test_that_leaks(rows):
    KEPT.append(torch.ones(rows, 64) * 2)


def test_with_the_fixture(leaks):
    history = []
    with leaks() as found:
        for _ in range(8):
            history.append(torch.ones(64, 64) * 2)
            found.step()
    assert found.leaks[0].holder.path.endswith("history[-1]")


def train(rows):
    assert torch.cuda.is_available()
    model = torch.nn.Linear(1024, 1024).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        model(torch.ones(rows, 1024, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.memory_budget("2 GiB", device="RTX 4090")
class TestBudget:
    @pytest.mark.parametrize("rows", [64, 2**19])
    def test_step(self, rows):
        train(rows)

    def test_fixtures_are_not_taken(self, tmp_path):
        train(8)


@pytest.mark.memory_budget("2 GiB", device="RTX 4090")
@pytest.mark.no_leak
def test_both():
    if torch.cuda.is_available():
        train(8)
    else:
        KEPT.append(torch.ones(512, 64) * 2)


@pytest.mark.memory_budget("5 potatoes", device="RTX 4090")
def test_no_size():
    train(8)


@pytest.mark.memory_budget("5 GiB", device="nope")
def test_no_card():
    train(8)
"""


def pytest_of(folder: Path, *arguments: str) -> str:
    known = any(entry.value == PLUGIN for entry in entry_points(group="pytest11"))
    plugin = [] if known else ["-p", PLUGIN]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-W",
        "error",
        "--strict-markers",
        *plugin,
    ]
    return subprocess.run([*command, *arguments], cwd=folder, capture_output=True, text=True, check=False).stdout


@pytest.mark.by_turns(2)
def test_markers_and_fixture(tmp_path: Path) -> None:
    (tmp_path / "test_memory.py").write_text(TESTS)
    said = pytest_of(tmp_path)
    assert "6 failed, 3 passed" in said, said
    # pytest says more of each failure in its summary where `CI` is set.
    before_summary = said.partition("short test summary")[0]
    for line in ("the budget: '5 potatoes' is not a size", "no GPU is called 'nope'"):
        assert before_summary.count(f"memory budget: nothing could be estimated: {line}") == 1
    assert "During handling" not in said
    assert said.count("test_memory.KEPT[-1] (global of module test_memory)") >= 2
    assert re.search(r"memory budget: \d\.\d\d? GiB of 2\.0+ GiB on NVIDIA GeForce RTX 4090\n", said), said
    assert "give it parameters (numbers, texts) and no fixtures, or name a target=" in said
    assert "Traceback" not in said


def test_the_start_of_pytest_imports_nothing_of_ours_but_the_plugin() -> None:
    code = f"import pytest, sys; before = set(sys.modules); import {PLUGIN}; print(*sorted(set(sys.modules) - before))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.split() == ["tightfit", "tightfit.integrations", PLUGIN]
