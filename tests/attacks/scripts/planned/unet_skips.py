"""A U-Net with skips and batch norms that predicts noise (diffusion), with an EMA of the weights."""

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


class Double(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.SiLU(), nn.Conv2d(b, b, 3, padding=1), nn.BatchNorm2d(b), nn.SiLU())
        self.time = nn.Linear(32, b)

    def forward(self, x, t):
        return self.net(x) + self.time(t)[:, :, None, None]


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList([Double(3, 24), Double(24, 48), Double(48, 64)])
        self.up = nn.ModuleList([Double(64 + 48, 48), Double(48 + 24, 24)])
        self.out = nn.Conv2d(24, 3, 1)

    def forward(self, x, t):
        t = torch.cat([torch.sin(t[:, None] * 10 ** (-torch.arange(16, device=x.device) / 8)), torch.cos(t[:, None] * 10 ** (-torch.arange(16, device=x.device) / 8))], 1)
        skips = []
        for i, block in enumerate(self.down):
            x = block(x, t)
            if i < 2:
                skips.append(x)
                x = F.max_pool2d(x, 2)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2, mode="nearest")
            x = block(torch.cat([x, skips.pop()], 1), t)
        return self.out(x)


model = UNet().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
ema = {n: p.detach().clone() for n, p in model.named_parameters()}
alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 100), 0).to(device)
for step in range(5):
    x = torch.randn(12, 3, 48, 48).to(device)
    t = torch.randint(0, 100, (12,), device=device)
    noise = torch.randn_like(x)
    a = alphas[t][:, None, None, None]
    loss = F.mse_loss(model(a.sqrt() * x + (1 - a).sqrt() * noise, t.to(torch.get_default_dtype())), noise)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    with torch.no_grad():
        for n, p in model.named_parameters():
            ema[n].mul_(0.99).add_(p, alpha=0.01)
    print(f"step {step} loss {loss.item():.9f}")
print(f"ema {sum(float(p.double().abs().sum()) for p in ema.values()):.9f}")

print(f"weights {sum(float(p.detach().double().abs().sum()) for p in model.parameters()):.9f}")
torch.save(model.state_dict(), "out.pt")
