"""Workloads for the virtual card alone, where sizes cost nothing: their memory is mostly what one kind of technique saves.

Activations and weights (`decoder`), gradients (`wide`), segments that are split for another phase (`uneven`), a name that keeps the last step's
logits (`lingering`), and what advice says to write instead (`clean`, `with_adapters`).
"""

from collections.abc import Callable, Iterator

import torch
from tests.cpu.empty_cache_models import uneven
from tests.cpu.kept_alive_models import clean, lingering
from torch import nn
from torch.nn import functional

__all__ = ["LARGE", "clean", "decoder", "lingering", "uneven", "wide", "with_adapters"]


class _Block(nn.Module):
    """A decoder layer without dropout, with the scores of its attention in full."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        batch, length, width = tokens.shape
        split = self.qkv(self.norm_1(tokens)).view(batch, length, 3, self.num_heads, -1)
        queries, keys, values = split.permute(2, 0, 3, 1, 4)
        scores = queries @ keys.transpose(-2, -1) / (width // self.num_heads) ** 0.5
        mixed = (scores.softmax(dim=-1) @ values).transpose(1, 2).reshape(batch, length, width)
        tokens = tokens + self.out(mixed)
        return tokens + self.down(functional.gelu(self.up(self.norm_2(tokens))))


class Decoder(nn.Module):
    """Embeddings, blocks in a list, a head, and the loss inside of the forward pass."""

    def __init__(self, vocabulary: int, width: int, num_layers: int, num_heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(_Block(width, num_heads) for _ in range(num_layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        # A loss of its own, so that its batch can be split from outside.
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens.roll(-1, dims=1).flatten())


def _trained(model: nn.Module, batch: Callable[[], torch.Tensor]) -> Iterator[torch.Tensor]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=False)
    while True:
        returned = model(batch())
        loss = returned.square().mean() if returned.dim() else returned
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def _tokens() -> torch.Tensor:
    return torch.randint(0, 4000, (8, 512), device="cuda")


def decoder() -> Iterator[torch.Tensor]:
    """Six layers of 512 numbers, trained on 8 x 512 tokens."""
    yield from _trained(Decoder(4000, 512, 6, 8).cuda(), _tokens)


class _Adapted(nn.Module):
    """A linear layer that is not trained, with two factors beside it that are."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.linear = linear
        self.first = nn.Linear(linear.in_features, rank, bias=False)
        self.second = nn.Linear(rank, linear.out_features, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs) + self.second(self.first(inputs))


def with_adapters(rank: int = 8) -> Iterator[torch.Tensor]:
    """`decoder` with low-rank adapters on all linear layers but the head, as peft's `all-linear` has them."""
    model = Decoder(4000, 512, 6, 8).requires_grad_(False)
    for block in model.blocks:
        for name in ("qkv", "out", "up", "down"):
            setattr(block, name, _Adapted(getattr(block, name), rank))
    yield from _trained(model.cuda(), _tokens)


def wide() -> Iterator[torch.Tensor]:
    """Large weights and few rows."""
    yield from _trained(
        nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(8))).cuda(), lambda: torch.randn(16, 4096, device="cuda")
    )


# How many steps each is traced for: what lingers is told from the third on.
LARGE = {"decoder": 2, "with_adapters": 2, "wide": 2, "uneven": 2, "lingering": 3, "clean": 3}
