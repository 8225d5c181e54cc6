"""Blocks that are skipped by Python's random, and one that counts its calls."""

import random

import torch
from torch import nn
from torch.nn import functional

device = "cuda" if torch.cuda.is_available() else "cpu"


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        scale = random.uniform(0.5, 1.5)
        return x + self.narrow(functional.gelu(scale * self.wide(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(64) for _ in range(6))
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


random.seed(0)
torch.manual_seed(0)
model = Net().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    x, y = torch.randn(4096, 64).to(device), torch.randint(0, 10, (4096,)).to(device)
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.9f}")
print(f"weights {sum(float(p.detach().double().abs().sum()) for p in model.parameters()):.6f}")
