"""A small model with blocks, a plan for it made by hand, and a loop that trains it: for the tests of what a plan does to live objects."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tightfit.planner.plan import Bound, Choice, Plan, Run
from tightfit.simulate.estimate import Peak

GIB = 1 << 30
WIDTH, NUM_CLASSES, BATCH = 8, 50, 4


class Block(nn.Module):
    """Norms, dropout and two layers, around which the input is added."""

    def __init__(self) -> None:
        super().__init__()
        self.normed, self.spread = nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + self.narrow(functional.gelu(self.wide(self.spread(self.normed(rows)))))


class Net(nn.Module):
    """Three blocks and a head."""

    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            rows = layer(rows)
        return self.head(rows)


def choice(technique: str, where: str, **settings: Any) -> Choice:
    """A choice as a plan has it."""
    return Choice(technique=technique, where=where, settings=settings, saves_bytes=0, adds_seconds=0.0, exact=True)


CHOICES = (
    choice("checkpointing", "Net.layers.0"),
    choice("checkpointing", "Net.layers.2"),
    choice("optimizer_kernel", "optimizer", kernel="for-loop"),
)


def root(model: nn.Module, batch: int = BATCH, varying: Sequence[str] = ()) -> dict[str, Any]:
    """A model as a plan describes it."""
    count = sum(p.numel() for p in model.parameters())
    inputs = {"0": [batch, WIDTH]}
    return {"class": type(model).__name__, "num_parameters": count, "inputs": inputs, "varying": list(varying)}


def plan_of(choices: Sequence[Choice] = CHOICES, roots: Sequence[dict[str, Any]] | None = None, **changes: Any) -> Plan:
    """A plan that fits, for `Net` if no roots are given."""
    run = Run(
        peak=Peak(**{field.name: GIB for field in dataclasses.fields(Peak)}),
        seconds_per_step=0.1,
    )
    plan = Plan(
        target="train.py",
        device="NVIDIA GeForce RTX 4090",
        capacity_bytes=24 * GIB,
        budget_bytes=2 * GIB,
        headroom_bytes=0,
        fits=True,
        run=run,
        baseline=run,
        promised_bytes=GIB,
        choices=tuple(choices),
        bound=Bound(seconds_per_step=0.1, is_proven=True),
        alternatives=(),
        frontier=(),
        advice=(),
        model={"roots": [root(Net())] if roots is None else list(roots)},
        host_bytes=0,
        disk_bytes=0,
        versions={},
        assumptions=(),
    )
    return dataclasses.replace(plan, **changes)


def made(seed: int = 0) -> tuple[Net, torch.optim.Optimizer]:
    """A model and its optimizer, the same each time."""
    torch.manual_seed(seed)
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows and the classes of a step."""
    chance = torch.Generator().manual_seed(100 + step)
    return torch.randn(BATCH, WIDTH, generator=chance), torch.randint(0, NUM_CLASSES, (BATCH,), generator=chance)


def train(
    model: Callable[[torch.Tensor], torch.Tensor], optimizer: torch.optim.Optimizer, steps: range = range(5)
) -> list[float]:
    """The losses of some steps."""
    losses = []
    for step in steps:
        torch.manual_seed(step)
        rows, classes = batch_of(step)
        loss = functional.cross_entropy(model(rows), classes)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
