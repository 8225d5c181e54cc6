"""MoCo: a momentum encoder, a queue of keys as a buffer, and InfoNCE."""

import math
import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cpu":
    torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
random.seed(0)
np.random.seed(0)


def encoder():
    return nn.Sequential(
        nn.Conv2d(3, 48, 3, padding=1), nn.GroupNorm(4, 48), nn.ReLU(), nn.Conv2d(48, 48, 3, padding=1), nn.GroupNorm(4, 48), nn.ReLU(),
        nn.MaxPool2d(2), nn.Conv2d(48, 96, 3, padding=1), nn.GroupNorm(4, 96), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 64),
    )


class Moco(nn.Module):
    def __init__(self, size=256):
        super().__init__()
        self.query, self.key = encoder(), encoder()
        self.key.load_state_dict(self.query.state_dict())
        for p in self.key.parameters():
            p.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(64, size), dim=0))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _keys(self, x):
        for q, k in zip(self.query.parameters(), self.key.parameters()):
            k.data.mul_(0.99).add_(q.data, alpha=0.01)
        return F.normalize(self.key(x), dim=1)

    @torch.no_grad()
    def _enqueue(self, keys):
        p = int(self.pointer)
        self.queue[:, p : p + len(keys)] = keys.T
        self.pointer[0] = (p + len(keys)) % self.queue.shape[1]

    def forward(self, a, b):
        q, k = F.normalize(self.query(a), dim=1), self._keys(b)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().detach()], 1) / 0.07
        self._enqueue(k)
        return F.cross_entropy(logits, torch.zeros(len(a), dtype=torch.long, device=a.device))


model = Moco().to(device)
optimizer = torch.optim.SGD(model.query.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4)
for step in range(5):
    x = torch.randn(32, 3, 32, 32)
    a, b = (x + 0.1 * torch.randn_like(x)).to(device), (x + 0.1 * torch.randn_like(x)).to(device)
    loss = model(a, b)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.9f}")

print(f"weights {sum(float(p.detach().double().abs().sum()) for p in model.parameters()):.9f}")
torch.save(model.state_dict(), "out.pt")
