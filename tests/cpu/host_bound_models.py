"""Small models whose training steps wait for the host, as generator functions."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import nn

NUM_CLASSES = 10


def _trained(
    model: nn.Module, batch: Callable[[], torch.Tensor], *, reads: bool = False, loads: bool = False
) -> Iterator[torch.Tensor]:
    model = model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    while True:
        inputs = batch().cuda() if loads else batch()
        loss = model(inputs)
        loss = loss if loss.ndim == 0 else loss.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if reads:
            loss.item()
        yield loss


class MixerBlock(nn.Module):
    """Two small networks, over places and over channels."""

    def __init__(self, num_places: int, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.places = nn.Sequential(
            nn.Linear(num_places, 2 * num_places), nn.GELU(), nn.Linear(2 * num_places, num_places)
        )
        self.channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = rows + self.places(self.first(rows).transpose(1, 2)).transpose(1, 2)
        return rows + self.channels(self.second(rows))


def mixer(batch_size: int = 32) -> Iterator[torch.Tensor]:
    """Blocks in one `Sequential`."""
    body = nn.Sequential(nn.Linear(48, 128), *(MixerBlock(64, 128) for _ in range(6)), nn.Linear(128, NUM_CLASSES))
    yield from _trained(body, lambda: torch.randn(batch_size, 64, 48, device="cuda"))


class Residual(nn.Module):
    """Two convolutions with batch norms."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm, self.last = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return F.relu(images + self.last(self.second(F.relu(self.norm(self.first(images))))))


def residual_net(batch_size: int = 32) -> Iterator[torch.Tensor]:
    """Deep and narrow."""
    layers = [
        nn.Conv2d(3, 16, 3, padding=1),
        *(Residual(16) for _ in range(8)),
        nn.Flatten(),
        nn.Linear(16 * 16 * 16, 1),
    ]
    model = nn.Sequential(*layers)
    yield from _trained(model, lambda: torch.randn(batch_size, 3, 16, 16), loads=True)


class Layer(nn.Module):
    """Attention and a small network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        batch, length, width = rows.shape
        q, k, v = self.qkv(self.first(rows)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        rows = rows + self.out(mixed)
        return rows + self.mlp(self.second(rows))


class Language(nn.Module):
    """A language model that returns its loss."""

    def __init__(self, num_layers: int, width: int, num_tokens: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_tokens, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, num_tokens, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.embedding(ids)
        for layer in self.layers:
            rows = layer(rows)
        return F.cross_entropy(self.head(self.norm(rows)).flatten(0, 1), ids.flatten())


def language_model(batch_size: int = 8) -> Iterator[torch.Tensor]:
    """Its loss is read in each step."""
    ids = lambda: torch.randint(4000, (batch_size, 128), device="cuda")  # noqa: E731
    yield from _trained(Language(6, 128, 4000), ids, reads=True)


def convolutions(batch_size: int = 8) -> Iterator[torch.Tensor]:
    """Chains of convolutions, norms and activations."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1)]
    for _ in range(8):
        layers += [nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU()]
    yield from _trained(nn.Sequential(*layers), lambda: torch.randn(batch_size, 3, 64, 64, device="cuda"))
