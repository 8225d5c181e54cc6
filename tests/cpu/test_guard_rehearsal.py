"""`guarded.rehearse`: the largest batch of a loader is tried before the first step, and leaves nothing behind."""

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.cpu import applied
from tests.cpu.capped_memory import CappedMemory
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

import tightfit
from tightfit.errors import ApplyError
from tightfit.guarding import largest_batch_of

MIB = 1 << 20
NUM_EXAMPLES, LONGEST = 200, 151


class Sentences(Dataset[torch.Tensor]):
    """Counts, draws and keeps what it was asked for: a scan must leave none of it behind."""

    def __init__(self) -> None:
        self.num_read = 0
        self.generator = np.random.default_rng(0)
        self.asked: list[int] = []

    def __len__(self) -> int:
        return NUM_EXAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        self.num_read += 1
        self.asked.append(index)
        length = 90 if index == LONGEST else 8 + index % 5
        noise = random.random() + float(np.random.rand()) + float(self.generator.random())
        return torch.randn(length, 16) + noise


def collate(rows: list[torch.Tensor]) -> torch.Tensor:
    return pad_sequence(rows, batch_first=True)


class Stops(Exception):
    """Ends a run."""


def sampled(data: Dataset[torch.Tensor]) -> DataLoader[torch.Tensor]:
    chances = WeightedRandomSampler([1.0] * NUM_EXAMPLES, NUM_EXAMPLES, generator=torch.Generator().manual_seed(1))
    return DataLoader(data, batch_size=8, sampler=chances, collate_fn=collate)


LOADERS: dict[str, Callable[[Dataset[torch.Tensor]], DataLoader[torch.Tensor]]] = {
    "in order": lambda data: DataLoader(data, batch_size=8, collate_fn=collate),
    "shuffled": lambda data: DataLoader(data, batch_size=8, shuffle=True, collate_fn=collate),
    "by chances": sampled,
}


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def trained(kind: str, *, rehearses: bool, is_scaled: bool = False) -> tuple[list[Any], Any]:
    """What a run of a few steps ends with, and what a rehearsal before it has found."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    data = Sentences()
    loader = LOADERS[kind](data)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.3), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2, enabled=is_scaled)
    history: list[float] = []

    def step(batch: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        history.append(float(loss.detach()))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return history[-1]

    found = None
    with tightfit.guard(model, optimizer) as guarded:
        batches = iter(loader)
        first = next(batches)
        if rehearses:
            found = guarded.rehearse(step, loader)
        guarded.step(step, first)
        for _ in range(4):
            guarded.step(step, next(batches))
    states = [v for state in optimizer.state.values() for v in state.values()]
    left = [data.num_read, list(data.asked), data.generator.random(), random.random(), np.random.rand(), history]
    return [*model.state_dict().values(), *states, torch.get_rng_state(), scaler.get_scale(), *left], found


@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("kind", LOADERS)
def test_a_run_after_a_rehearsal_is_the_one_without(kind: str, is_scaled: bool) -> None:
    (expected, _), (values, found) = (trained(kind, rehearses=each, is_scaled=is_scaled) for each in (False, True))
    for one, other in zip(expected, values, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    if kind != "by chances":
        assert (found.shapes, found.plan, found.why_not) == ("8x90x16", -1, "")
    assert (found.num_seen, found.num_examples) == (NUM_EXAMPLES, NUM_EXAMPLES)


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        return iter(torch.zeros(4, 16))


class Broken(Sentences):
    def __getitem__(self, index: int) -> torch.Tensor:
        raise ValueError("no such file")


class Slow(Sentences):
    def __getitem__(self, index: int) -> torch.Tensor:
        import time

        time.sleep(60)
        return torch.zeros(1)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (Stream(), "have no numbers"),
        (Broken(), "could not be read: ValueError: no such file"),
        (Slow(), "took more than"),
    ],
    ids=["a stream", "broken", "slow"],
)
def test_what_cannot_be_looked_through_is_said_and_nothing_is_tried(
    data: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(largest_batch_of, "_SECONDS_TO_GIVE_UP", 2.0 if isinstance(data, Slow) else 60.0)
    model = torch.nn.Linear(16, 1)

    def step(batch: torch.Tensor) -> None:
        raise Stops

    with tightfit.guard(model) as guarded:
        found = guarded.rehearse(step, DataLoader(data, batch_size=2))
    assert reason in found.why_not and not found.shapes


def test_the_plan_that_the_largest_batch_needs_is_found_and_taken_off_again() -> None:
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    model, optimizer = applied.made()
    data = [torch.randn(4096 if number == 3 else 4, applied.WIDTH) for number in range(8)]
    loader = DataLoader(data, batch_sampler=[[number] for number in range(8)], collate_fn=lambda rows: rows[0])
    places = [f"Net.layers.{number}" for number in range(3)]
    plans = [applied.plan_of([applied.choice("checkpointing", place) for place in places])]

    def step(rows: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()

    def room(capacity: int) -> tuple[Any, int]:
        capped = CappedMemory(capacity)
        with tightfit.guard(model, optimizer, plans=plans) as guarded, capped:
            found = guarded.rehearse(step, loader)
            assert guarded.plan_in_use == -1 and not optimizer.state
        return found, capped.peak

    plain, peak = room(1 << 40)
    assert (plain.shapes, plain.plan) == ("4096x8", -1)
    needs_plan, lower = room(peak * 9 // 10)
    assert needs_plan.plan == 0 and lower < peak
    with pytest.raises(torch.OutOfMemoryError) as raised:
        room(peak // 4)
    assert "tightfit: tried: released memory; plan 1" in raised.value.__notes__


def test_a_function_whose_changes_cannot_be_taken_back_ends_the_run_before_it_begins() -> None:
    model = torch.nn.Linear(16, 1)

    def step(batch: torch.Tensor) -> None:
        with torch.no_grad():
            model.weight.add_(batch.mean())

    with tightfit.guard(model) as guarded, pytest.raises(ApplyError, match="weights had been updated in it already"):
        guarded.rehearse(step, LOADERS["in order"](Sentences()))
