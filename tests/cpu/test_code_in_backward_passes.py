"""Programs that run code of their own within a backward pass, beside updates that are made in a second backward pass: statistics and random numbers are the plain run's."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tightfit.planner.plan import Choice
from tightfit.runtime.apply import apply_choices


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inner = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8) if kind == "norm" else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        drawn = torch.rand(1) if self.kind == "draws" else torch.zeros(1)
        if self.kind == "numpy":
            drawn = torch.tensor([np.random.random()], dtype=torch.float32)
        y = self.norm(self.inner(x))
        if self.kind == "drops":
            y = nn.functional.dropout(y, 0.5, training=True)
        return x + torch.relu(y) + 0.0 * drawn


class CallsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        ctx.block = block
        ctx.save_for_backward(x)
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.no_grad():
            ctx.block(x)
        return None, gradients[0] * (1.0 + torch.rand(()))


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(2))
        self.last = nn.Linear(8, 2)
        # One element at five places, which torch does not write to.
        self.register_buffer("scale", torch.ones(()).expand(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            if self.kind == "function":
                x = block(CallsInBackward.apply(block, x))
            else:
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=self.kind == "norm")
        return self.last(x)


def trained(kind: str, *, clips: bool | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Net(kind)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    session = None
    if clips is not None:
        choice = Choice(
            technique="update_in_backward",
            where="optimizer",
            saves_bytes=0,
            adds_seconds=0.0,
            exact=True,
            settings={"kernel": "same", "clips": clips},
        )
        session = apply_choices([choice], model, [optimizer])
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(5, 4)).square().mean().backward()
        optimizer.step()
    if session is not None:
        session.undo()
    drawn = torch.tensor(np.random.random())
    return [t.detach().clone() for t in (*model.parameters(), *model.buffers(), torch.get_rng_state(), drawn)]


@pytest.fixture(autouse=True)
def own_generator() -> Iterator[None]:
    """numpy's generator as it was, whatever kind a test has set."""
    before = np.random.get_bit_generator()
    yield
    np.random.set_bit_generator(before)


@pytest.mark.parametrize("generator", [np.random.MT19937, np.random.PCG64])
def test_what_numpy_draws_in_a_backward_pass_is_drawn_once(generator: type[np.random.BitGenerator]) -> None:
    def drawn(*, clips: bool | None) -> list[torch.Tensor]:
        np.random.set_bit_generator(generator(3))
        return trained("numpy", clips=clips)

    plain, planned = drawn(clips=None), drawn(clips=False)
    assert all(torch.equal(one, other) for one, other in zip(plain, planned, strict=True))


@pytest.mark.parametrize("kind", ["norm", "draws", "drops", "function"])
def test_a_second_backward_pass_leaves_no_trace(kind: str) -> None:
    np.random.seed(0)
    plain = trained(kind, clips=None)
    np.random.seed(0)
    planned = trained(kind, clips=False)
    assert all(torch.equal(one, other) for one, other in zip(plain, planned, strict=True))
