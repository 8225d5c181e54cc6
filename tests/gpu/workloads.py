"""Small training loops that are run on a real card and on the virtual one."""

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        heads = (t.view(batch, length, -1, 64).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        attended = functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)
        x = x + self.out(attended.reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.second_norm(x))))


def _train(model, make_batch, loss_of, *, dtype=None):
    optimizer = torch.optim.AdamW(model.parameters())
    while True:
        batch = make_batch()
        with torch.autocast("cuda", dtype=dtype, enabled=dtype is not None):
            loss = loss_of(model(batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def perceptron():
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(4096, 4096), nn.GELU()))).cuda()
    yield from _train(model, lambda: torch.randn(2048, 4096, device="cuda"), lambda out: out.square().mean())


def transformer(dtype=None):
    model = nn.Sequential(nn.Embedding(32000, 1024), *(Block(1024) for _ in range(8)), nn.Linear(1024, 32000)).cuda()
    labels = torch.zeros(4 * 512, dtype=torch.long, device="cuda")
    yield from _train(
        model,
        lambda: torch.randint(0, 32000, (4, 512), device="cuda"),
        lambda out: functional.cross_entropy(out.view(-1, 32000), labels),
        dtype=dtype,
    )


def transformer_in_autocast():
    yield from transformer(torch.bfloat16)


def convolutions():
    model = nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Conv2d(64, 128, 3, 2, 1),
        nn.BatchNorm2d(128),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, 1000),
    ).cuda()
    yield from _train(model, lambda: torch.randn(64, 3, 224, 224, device="cuda"), lambda out: out.square().mean())
