"""Blocks that map a function over stacked weights or examples (`torch.func.vmap`), and blocks with sparse tensors."""

import torch
from tests.attacks.models import WIDTH, Block, Net, train
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn


class _Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3, WIDTH, WIDTH) * 0.2)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.func.vmap(lambda weight: torch.tanh(self.norm(x) @ weight))(self.weights).mean(0)


@attack("recomputation", "blocks map a layer over three stacked weights by vmap, and take the mean")
def mapped_over_weights(t: Trial) -> None:
    train(t, Net([_Stacked(), _Stacked()]))


class _Centred(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Within the map a token sees its own example, and there all other tokens.
        return x + torch.func.vmap(lambda example: self.inner(example - example.mean(0)))(x)


@attack("parts", "blocks map over examples by vmap what subtracts the mean over tokens")
def mapped_over_examples(t: Trial) -> None:
    train(t, Net([_Centred(), _Centred()]))


class _Sparse(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", torch.stack([torch.arange(WIDTH), torch.arange(WIDTH).roll(1)]))
        self.values = nn.Parameter(torch.randn(WIDTH) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixing = torch.sparse_coo_tensor(self.places, self.values, (WIDTH, WIDTH))
        return x + self.inner(torch.sparse.mm(mixing, x.reshape(-1, WIDTH).t()).t().reshape(x.shape))


@attack("parts", "blocks make a sparse matrix of a trained list of values, and multiply channels by it")
def sparse_of_trained_values(t: Trial) -> None:
    train(t, Net([_Sparse(), _Sparse()]))
