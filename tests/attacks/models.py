"""Parts that attacks are built of: a token model with blocks and a head, an image model with a chain, batches, and the plain loop."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional

WIDTH, NUM_CLASSES = 8, 7
BATCH, TOKENS = 4, 6


class Block(nn.Module):
    """A feed-forward block with a residual; subclasses change `inner` or `forward`."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        """The feed-forward layers."""
        return self.narrow(functional.gelu(self.wide(self.norm(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens of the same shape."""
        return x + self.inner(x)


class Net(nn.Module):
    """Stem, blocks and head; with classes given, it returns their cross-entropy, and logits otherwise."""

    returns_loss = True

    def __init__(self, blocks: Iterable[nn.Module] | None = None, *, sequential: bool = True) -> None:
        super().__init__()
        made = list(blocks) if blocks is not None else [Block() for _ in range(2)]
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.Sequential(*made) if sequential else nn.ModuleList(made)
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """What the head is given."""
        x = self.stem(x)
        if isinstance(self.blocks, nn.Sequential):
            return self.blocks(x)
        for block in self.blocks:
            x = block(x)
        return x

    def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The mean over all tokens."""
        return functional.cross_entropy(logits.reshape(-1, NUM_CLASSES), y.reshape(-1))

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        """The loss, or logits."""
        logits = self.head(self.features(x))
        return logits if y is None else self.loss(logits, y)


class Images(nn.Module):
    """A chain of convolutions and a linear head over its mean."""

    returns_loss = True

    def __init__(self, layers: Iterable[nn.Module] | None = None) -> None:
        super().__init__()
        made = (
            list(layers)
            if layers is not None
            else [nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 4, 3, padding=1)]
        )
        self.stem = nn.Conv2d(3, 3, 1)
        self.chain = nn.Sequential(*made)
        self.head = nn.Linear(4, NUM_CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        """The loss, or logits."""
        logits = self.head(self.chain(self.stem(x)).mean((2, 3)))
        return logits if y is None else functional.cross_entropy(logits, y)


def tokens(step: int, batch: int = BATCH, length: int = TOKENS) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and their classes, the same for the same step; the global random state is left alone."""
    chance = torch.Generator(torch.get_default_device()).manual_seed(100 + step)
    x = torch.randn(batch, length, WIDTH, generator=chance, dtype=torch.float64).to(torch.get_default_dtype())
    return x, torch.randint(0, NUM_CLASSES, (batch, length), generator=chance)


def images(step: int, batch: int = BATCH, size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Images and their classes."""
    chance = torch.Generator(torch.get_default_device()).manual_seed(200 + step)
    x = torch.randn(batch, 3, size, size, generator=chance, dtype=torch.float64).to(torch.get_default_dtype())
    return x, torch.randint(0, NUM_CLASSES, (batch,), generator=chance)


def sgd(model: nn.Module, lr: float = 0.1, momentum: float = 0.9) -> torch.optim.Optimizer:
    """The optimizer of most attacks: an update is as wrong as its gradient is."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, momentum=momentum)


def adamw(model: nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    """The optimizer of most programs."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)


def train(
    t: Trial,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    num_steps: int = 4,
    batch: Callable[[int], Any] = tokens,
    before: Callable[[int], Any] = lambda _: None,
    between: Callable[[int], Any] = lambda _: None,
    after: Callable[[int], Any] = lambda _: None,
    applied: bool = False,
) -> None:
    """The plain loop; `before` runs before the forward, `between` after the backward pass, `after` after the step."""
    optimizer = optimizer or sgd(model)
    if not applied:
        t.apply(model, optimizer)
    for step in range(num_steps):
        before(step)
        loss = model(*batch(step))
        t.note("loss", loss)
        optimizer.zero_grad()
        loss.backward()
        between(step)
        optimizer.step()
        after(step)
        t.end_step()
