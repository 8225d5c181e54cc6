"""Loops that keep things, and one that does not."""

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional


def _parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 4096)).cuda()
    return model, torch.optim.AdamW(model.parameters())


def lingering() -> Iterator[torch.Tensor]:
    """The last logits live on under their name."""
    model, optimizer = _parts()
    while True:
        logits = model(torch.randn(4096, 512, device="cuda"))
        loss = functional.cross_entropy(logits, torch.zeros(4096, dtype=torch.int64, device="cuda"))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def growing() -> Iterator[torch.Tensor]:
    """A list keeps what a monitor computed, with the graph behind it."""
    model, optimizer = _parts()
    seen = []
    while True:
        hidden = model[0](torch.randn(4096, 512, device="cuda"))
        loss = model[2](hidden).square().mean()
        seen.append(hidden.square().mean())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def clean() -> Iterator[torch.Tensor]:
    """Nothing lives on but the loss."""
    model, optimizer = _parts()
    while True:
        loss = functional.cross_entropy(
            model(torch.randn(4096, 512, device="cuda")), torch.zeros(4096, dtype=torch.int64, device="cuda")
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss
