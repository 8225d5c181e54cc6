"""`guard`: a step that finds no memory is run again, and the run ends with the plain run's losses and weights, to the bit."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from benchmarks.guard import Failing

import tightfit

NUM_STEPS = 4
# For each model; `python -m benchmarks.guard` has two hundred.
NUM_FAILURES = 8
Step = Callable[[torch.Tensor], torch.Tensor]


class Convolutions(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Conv2d(1, 4, 3),
            torch.nn.BatchNorm2d(4),
            torch.nn.ReLU(),
            torch.nn.Conv2d(4, 2, 3),
            torch.nn.BatchNorm2d(2, momentum=None),
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.body(rows.view(-1, 1, 8, 8)).square().mean()


class Recurrent(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = torch.nn.LSTM(8, 12, batch_first=True, num_layers=2, dropout=0.3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.cell(rows.view(-1, 8, 8))[0].square().mean()


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True) for _ in range(2)
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = rows.view(-1, 8, 8)
        for layer in self.layers:
            rows = layer(rows)
        return rows.square().mean()


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
        self.last.weight = self.first.weight
        self.noise = torch.nn.Dropout(0.5)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.last(self.noise(torch.relu(self.first(rows)))).square().mean()


class Stateful(torch.nn.Module):
    """Counts its calls, keeps a moving average and a queue, draws from Python's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(64, 16)
        self.num_calls = 0
        self.seen: list[float] = []
        self.register_buffer("average", torch.zeros(16))
        self.queue = torch.zeros(4, 16)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        out = self.inner(rows) * random.random() + self.average * self.num_calls
        self.average.mul_(0.9).add_(out.detach().mean(0))
        self.queue[self.num_calls % 4] = out.detach()[0]
        self.seen.append(float(self.num_calls))
        return out.square().mean() + self.queue.sum() * 0.01


class Mixed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(16, 8)
        self.norm = torch.nn.LayerNorm(8)
        self.head = torch.nn.Linear(8, 4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        ids = (rows.abs() * 7).long() % 16
        with torch.autocast("cpu", torch.bfloat16):
            return torch.nn.functional.cross_entropy(
                self.head(self.norm(self.table(ids))).flatten(0, 1).float(), (ids % 4).flatten()
            )


MODELS: dict[str, tuple[type[torch.nn.Module], Callable[[Any], torch.optim.Optimizer]]] = {
    "convolutions": (Convolutions, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "recurrent": (Recurrent, lambda p: torch.optim.Adam(p, lr=0.01)),
    "attention": (Attention, lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True)),
    "tied": (Tied, lambda p: torch.optim.RMSprop(p, lr=0.01)),
    "stateful": (Stateful, lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True)),
    "mixed": (Mixed, lambda p: torch.optim.Adagrad(p, lr=0.1)),
}


class Loop:
    """One training: the same from the same seed."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(3)
        random.seed(3)
        make, optimizer = MODELS[kind]
        self.model = make()
        self.optimizer = optimizer(self.model.parameters())
        self.batches = list(torch.randn(NUM_STEPS, 6, 64))

    def step(self, batch: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.model(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach()

    def result(self, losses: list[torch.Tensor]) -> list[Any]:
        states = [v for state in self.optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
        own = [getattr(self.model, name, None) for name in ("num_calls", "seen", "queue")]
        return [*losses, *self.model.state_dict().values(), *states, torch.get_rng_state(), random.random(), *own]


def run(kind: str, *numbers: int) -> tuple[list[Any], Failing, dict[str, int]]:
    loop, failing = Loop(kind), Failing(*numbers)

    def step(batch: torch.Tensor) -> torch.Tensor:
        with failing.counting():
            return loop.step(batch)

    with tightfit.guard(loop.model, loop.optimizer) as guarded, failing:
        losses = [guarded.step(step, batch) for batch in loop.batches]
    return loop.result(losses), failing, dict(guarded.statistics)


def plain(kind: str) -> tuple[list[Any], int]:
    loop = Loop(kind)
    with Failing() as failing, failing.counting():
        losses = [loop.step(batch) for batch in loop.batches]
    return loop.result(losses), failing.num_operators


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return bool(one == other)


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("kind", MODELS)
def test_a_step_without_an_error_is_the_plain_one(kind: str) -> None:
    expected, _ = plain(kind)
    found, _, statistics = run(kind)
    assert all(map(same, expected, found))
    assert statistics["steps"] == NUM_STEPS and statistics.get("out of memory", 0) == 0


@pytest.mark.parametrize("kind", MODELS)
def test_wherever_memory_runs_out_the_run_ends_as_the_plain_one(kind: str) -> None:
    expected, num_operators = plain(kind)
    draw = random.Random(kind)
    for number in sorted(draw.sample(range(1, num_operators + 1), NUM_FAILURES)):
        found, failing, statistics = run(kind, number)
        assert failing.num_failures == 1, number
        assert all(map(same, expected, found)), number
        assert statistics.get("replays", 0) + statistics.get("retried operators", 0) == 1, number
