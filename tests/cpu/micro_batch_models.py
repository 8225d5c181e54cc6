"""Models that return their loss, and some that no part of a batch may stand for; on the host, and as workloads for the virtual card."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional


class Body(nn.Module):
    """Some layers, whose activations outweigh its parameters."""

    def __init__(self, width: int = 16, num_layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(num_layers))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            values = values + layer(values)
        return values


class Tokens(nn.Module):
    """A mean over the targets that are not ignored; `(logits, loss)`, as nanoGPT returns them."""

    def __init__(self, ignore_index: int = -1, weighted: bool = False, smoothing: float = 0.0) -> None:
        super().__init__()
        self.embedding, self.body = nn.Embedding(11, 16), Body()
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.ignore_index, self.smoothing = ignore_index, smoothing
        self.class_weight = nn.Buffer(torch.linspace(0.5, 2.0, 11)) if weighted else None

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        logits = self.frozen(self.body(self.embedding(tokens))) @ self.embedding.weight.T
        if targets is None:
            return logits, None
        loss = functional.cross_entropy(
            logits.flatten(0, 1),
            targets.flatten(),
            weight=self.class_weight,
            ignore_index=self.ignore_index,
            label_smoothing=self.smoothing,
        )
        return logits, loss


class Regression(nn.Module):
    """A loss over numbers; a mean, or a sum, or one that is scaled."""

    def __init__(self, reduction: str = "mean", scale: float = 1.0) -> None:
        super().__init__()
        self.body, self.reduction, self.scale = Body(), reduction, scale

    def forward(self, values: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(self.body(values), target, reduction=self.reduction) / self.scale


class Normalised(Regression):
    """With a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, values: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(values), target)


class Dropped(Regression):
    """With dropout, in a function and not in a module."""

    def forward(self, values: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return super().forward(functional.dropout(values, 0.2, self.training), target)


class Contrastive(nn.Module):
    """Every example against all others of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Body()

    def forward(self, values: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        scores = self.body(values) @ target.T
        return functional.cross_entropy(scores, torch.arange(len(values), device=values.device))


class Centred(Regression):
    """The batch's mean is taken off, by hand: nothing but numbers tells."""

    def forward(self, values: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return super().forward(values - values.mean(0), target)


class Balanced(Regression):
    """A second loss is added to the first."""

    def forward(self, values: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return super().forward(values, target) + self.body(values).mean(0).square().sum()


class Counting(Regression):
    """A forward that leaves something behind."""

    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Buffer(torch.zeros(()))

    def forward(self, values: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return super().forward(values, target)


def tokens_of(step: int, batch: int, device: str = "cpu", length: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch whose rows have ever fewer targets that count; the last one none."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 11, (batch, length), generator=generator)
    targets = tokens.roll(-1, dims=1)
    for row in range(batch):
        targets[row, : row * length // max(1, batch - 1)] = -1
    return tokens.to(device), targets.to(device)


def numbers_of(step: int, batch: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of numbers with their targets."""
    generator = torch.Generator().manual_seed(step)
    values = torch.randn(2, batch, 16, generator=generator).to(device)
    return values[0], values[1]


def large(batch: int = 64) -> Iterator[torch.Tensor]:
    """A workload that is nearly all activations."""

    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Body(256, 8)

        def forward(self, values: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return functional.mse_loss(self.body(values), target)

    yield from _loop(Large(), lambda: torch.randn(2, batch, 512, 256, device="cuda"))


def causal(batch: int = 8, autocast: bool = False) -> Iterator[torch.Tensor]:
    """A decoder of Hugging Face, without dropout."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, vocab_size=4096
    )
    model = LlamaForCausalLM(config).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    while True:
        tokens = torch.randint(0, 4096, (batch, 512), device="cuda")
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def accumulated(batch: int = 8, width: int = 2048) -> Iterator[torch.Tensor]:
    """Two backward passes a step, of a model whose gradients are most of what it holds."""
    model = Wide(width).cuda()
    optimizer = torch.optim.SGD(model.parameters())
    while True:
        for _ in range(2):
            loss = model(*torch.randn(2, batch * 256, width, device="cuda"))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


class Wide(nn.Module):
    """Layers with large weights, and a loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(6)))

    def forward(self, values: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(self.layers(values), target)


def contrastive(batch: int = 64) -> Iterator[torch.Tensor]:
    """`Contrastive` on the card."""
    yield from _loop(Contrastive(), lambda: torch.randn(2, batch, 16, device="cuda"))


def beside(batch: int = 64) -> Iterator[torch.Tensor]:
    """A loss function that is a module of its own."""
    model, criterion = Body(64).cuda(), nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters())
    while True:
        scores = model(torch.randn(batch, 64, device="cuda"))
        loss = criterion(scores, torch.zeros(batch, dtype=torch.int64, device="cuda"))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def _loop(model: nn.Module, data: Callable[[], torch.Tensor]) -> Iterator[torch.Tensor]:
    model.cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    while True:
        loss = model(*data())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss
