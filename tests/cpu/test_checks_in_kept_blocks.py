"""A block that keeps some of its products and has a module in tiles: what tiles are checked with, once in one run and not in the other, is not counted among the products."""

import copy

import torch
from tests.cpu.applied import choice
from torch import nn

from tightfit.runtime.apply import apply_choices


class Block(nn.Module):
    """A layer, and one with two more that runs in tiles."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.inner = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the two make of it."""
        return x + self.inner(torch.tanh(self.first(x)))


class TwoLengths(nn.Module):
    """Calls its block with sequences of two lengths in a step, so that each call is the first one of its shape again."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over both."""
        return self.block(x).square().mean() + self.block(x[:, :-1]).square().mean()


def test_checks_of_tiles_are_no_products_of_the_block() -> None:
    torch.manual_seed(0)
    plain = TwoLengths().double()
    planned = copy.deepcopy(plain)
    batches = [torch.randn(2, 34, 8, dtype=torch.float64) for _ in range(4)]
    losses = []
    for model in (plain, planned):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if model is planned:
            tiles = choice("tiled_tokens", "TwoLengths.block.inner", num_tiles=4, recomputed=True)
            kept = choice("selective_checkpointing", "TwoLengths.block", keep=[1], outputs=["inner.0"])
            apply_choices([kept, tiles], model, [optimizer])
        found = []
        for batch in batches:
            loss = model(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        losses.append(found)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=0.0)
    for name, weight in plain.named_parameters():
        torch.testing.assert_close(planned.get_parameter(name), weight, rtol=1e-12, atol=1e-14)
