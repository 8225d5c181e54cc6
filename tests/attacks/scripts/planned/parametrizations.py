"""Spectral norm on a trunk and weight norm on its head, with a custom autograd function between."""

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

from torch.nn.utils.parametrizations import spectral_norm, weight_norm


class ClampSTE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(-1, 1).mul(8).round().div(8)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x.abs() <= 1)


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = spectral_norm(nn.Linear(width, 3 * width)), nn.Linear(3 * width, width)

    def forward(self, x):
        return x + self.down(ClampSTE.apply(F.silu(self.up(self.norm(x)))))


model = nn.Sequential(nn.Linear(64, 256), *[Layer(256) for _ in range(5)], weight_norm(nn.Linear(256, 50))).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, amsgrad=True)
for step in range(6):
    x, y = torch.randn(1024, 64).to(device), torch.randint(0, 50, (1024,)).to(device)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.9f}")

print(f"weights {sum(float(p.detach().double().abs().sum()) for p in model.parameters()):.9f}")
torch.save(model.state_dict(), "out.pt")
