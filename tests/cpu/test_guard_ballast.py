"""`guard(ballast=...)`: memory that is given up when a step finds none, on a simulated card that other processes fill."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cpu.capped_memory import CappedMemory
from tests.forked_python import forked_python

import tightfit
from tightfit.errors import UsageError
from tightfit.guarding.memory.ballast import Ballast

MIB = 1 << 20
# The rows of the batches: the fourth is the long one.
ROWS = (64, 64, 64, 512, 64, 64)


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def trained(
    capped: CappedMemory | None, ballast: str | int = 0, *, has_neighbours: bool = True
) -> tuple[list[Any], dict[str, int]]:
    """The losses and weights of a run whose card other processes fill after its first step, and the counts of its guard."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.GELU(), torch.nn.Linear(512, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = [torch.randn(rows, 64) for rows in ROWS]

    def step(rows: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = model(rows).square().mean()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    losses = []
    with tightfit.guard(model, optimizer, ballast=ballast, calm_steps=1) as guard:
        for number, batch in enumerate(batches):
            if capped is None:
                losses.append(guard.step(step, batch))
                continue
            if number == 2 and has_neighbours:
                # They leave what this run has needed so far, and a little.
                capped.others += capped.free - MIB
            with capped:
                losses.append(guard.step(step, batch))
    return [*losses, *model.state_dict().values()], dict(guard.statistics)


def is_same(one: list[Any], other: list[Any]) -> bool:
    return all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(one, other, strict=True))


def test_what_other_processes_would_have_taken_is_there_for_the_long_batch() -> None:
    expected, _ = trained(None)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        trained(CappedMemory(64 * MIB))
    assert "tightfit: tried: released memory" in raised.value.__notes__
    capped = CappedMemory(64 * MIB)
    found, statistics = trained(capped, "8MiB")
    assert is_same(expected, found)
    assert capped.num_failures >= 1 and statistics["ballast released"] == 1
    assert statistics["replays"] == 1


def test_it_is_held_from_the_first_step_to_the_end() -> None:
    capped = CappedMemory(64 * MIB)
    _, statistics = trained(capped, 8 * MIB, has_neighbours=False)
    assert "ballast released" not in statistics
    assert capped.peak > 8 * MIB
    # Nothing of it is left.
    assert capped.free > 56 * MIB


def test_it_is_taken_again_after_calm_where_there_is_room() -> None:
    ballast, capped = Ballast(8 * MIB, lambda: torch.device("cpu"), calm_steps=2), CappedMemory(16 * MIB)
    with capped:
        ballast.hold()
        assert ballast.release() and not ballast.release()
        taken = []
        for _ in range(6):
            ballast.step_succeeded()
            ballast.hold()
            taken.append(ballast.is_held)
    assert taken == [False, True, True, True, True, True]
    with capped:
        ballast.release()
        capped.others = 12 * MIB
        tried = []
        for _ in range(5):
            ballast.step_succeeded()
            ballast.hold()
            tried.append(capped.num_failures)
    # Not in every step, while others have the room.
    assert not ballast.is_held and tried == [0, 1, 1, 2, 2]


def test_a_run_without_room_for_it_goes_on_without() -> None:
    expected, _ = trained(None)
    capped = CappedMemory(16 * MIB)
    found, statistics = trained(capped, "32MiB", has_neighbours=False)
    assert is_same(expected, found) and "ballast released" not in statistics


def test_what_is_no_size_is_said_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(UsageError), tightfit.guard(torch.nn.Linear(1, 1), ballast="much"):
        pass
    (tmp_path / "train.py").write_text("print('ran')")
    told = forked_python("-m", "tightfit", "run", "--guard", "--ballast", "much", "train.py", cwd=tmp_path)
    assert told.returncode == 2 and "--ballast" in told.stderr and not told.stdout
