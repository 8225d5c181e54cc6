"""The comparison by value of a tile and its halves, in half precision: what a kernel rounds is no difference, what mixes tokens is one."""

import pytest
import torch
from torch import nn

from tightfit.effects.values.value_checks import halves_differ

WIDTH = 64


class Block(nn.Module):
    """A feed-forward block; with `mixes`, it takes off a part of the mean over the tokens."""

    def __init__(self, *, mixes: bool = False) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
        )
        self.mixes = mixes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mixes:
            x = x - 0.5 * x.mean(1, keepdim=True)
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm(x))))


@pytest.mark.parametrize("is_cast", [True, False], ids=["autocast", "half"])
@pytest.mark.parametrize("num_tokens", [64, 512])
def test_a_sum_that_a_kernel_rounds_is_no_difference(num_tokens: int, is_cast: bool) -> None:
    torch.manual_seed(0)
    module = Block() if is_cast else Block().bfloat16()
    before = dict(module.named_parameters())
    x = torch.randn(4, num_tokens, WIDTH, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_cast):
        assert halves_differ(module, module, x, 1) == ""
    assert all(value is before[name] for name, value in module.named_parameters())


@pytest.mark.parametrize("is_cast", [True, False], ids=["autocast", "half"])
def test_what_mixes_tokens_is_one(is_cast: bool) -> None:
    torch.manual_seed(0)
    module = Block(mixes=True) if is_cast else Block(mixes=True).bfloat16()
    x = torch.randn(4, 64, WIDTH, dtype=torch.bfloat16) + 1
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_cast):
        assert "of half a tile differs" in halves_differ(module, module, x, 1)
