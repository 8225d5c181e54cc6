"""WGAN-GP: a critic with a gradient penalty, and a generator; two optimizers."""

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


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.LeakyReLU(0.2), nn.Conv2d(32, 64, 4, 2, 1), nn.LeakyReLU(0.2),
            nn.Conv2d(64, 64, 3, padding=1), nn.LeakyReLU(0.2), nn.Conv2d(64, 64, 4, 2, 1), nn.LeakyReLU(0.2),
        )
        self.out = nn.Linear(64 * 64, 1)

    def forward(self, x):
        return self.out(self.net(x).flatten(1))


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.start = nn.Linear(32, 64 * 64)
        self.net = nn.Sequential(
            nn.ConvTranspose2d(64, 64, 4, 2, 1), nn.BatchNorm2d(64), nn.ReLU(),
            nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 3, 3, padding=1), nn.Tanh(),
        )

    def forward(self, z):
        return self.net(self.start(z).view(-1, 64, 8, 8))


model, critic = Generator().to(device), Critic().to(device)
opt_g = torch.optim.Adam(model.parameters(), lr=2e-4, betas=(0.0, 0.9))
opt_c = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.0, 0.9))
for step in range(5):
    real = torch.randn(16, 3, 32, 32).to(device)
    for _ in range(2):
        fake = model(torch.randn(16, 32, device=device)).detach()
        eps = torch.rand(16, 1, 1, 1, device=device)
        mixed = (eps * real + (1 - eps) * fake).requires_grad_()
        (grad,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        penalty = ((grad.flatten(1).norm(dim=1) - 1) ** 2).mean()
        loss_c = critic(fake).mean() - critic(real).mean() + 10 * penalty
        opt_c.zero_grad()
        loss_c.backward()
        opt_c.step()
    loss_g = -critic(model(torch.randn(16, 32, device=device))).mean()
    opt_g.zero_grad()
    loss_g.backward()
    opt_g.step()
    print(f"step {step} critic {loss_c.item():.9f} generator {loss_g.item():.9f} penalty {penalty.item():.9f}")
print(f"critic {sum(float(p.detach().double().abs().sum()) for p in critic.parameters()):.9f}")

print(f"weights {sum(float(p.detach().double().abs().sum()) for p in model.parameters()):.9f}")
torch.save(model.state_dict(), "out.pt")
