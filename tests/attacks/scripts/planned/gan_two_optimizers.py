"""A GAN with spectral norm, one backward pass through both networks, hinge losses."""

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

from torch.nn.utils import spectral_norm


class Up(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(a, b, 3, padding=1), nn.Conv2d(b, b, 3, padding=1)
        self.bn1, self.bn2 = nn.BatchNorm2d(b), nn.BatchNorm2d(b)

    def forward(self, x):
        x = F.interpolate(x, scale_factor=2)
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class Down(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.conv1, self.conv2 = spectral_norm(nn.Conv2d(a, b, 3, padding=1)), spectral_norm(nn.Conv2d(b, b, 4, 2, 1))

    def forward(self, x):
        return F.leaky_relu(self.conv2(F.leaky_relu(self.conv1(x), 0.2)), 0.2)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.start, self.ups, self.out = nn.Linear(64, 96 * 16), nn.Sequential(Up(96, 64), Up(64, 48), Up(48, 32)), nn.Conv2d(32, 3, 3, padding=1)

    def forward(self, z):
        return torch.tanh(self.out(self.ups(self.start(z).view(-1, 96, 4, 4))))


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.downs, self.out = nn.Sequential(Down(3, 32), Down(32, 48), Down(48, 64)), spectral_norm(nn.Linear(64 * 16, 1))

    def forward(self, x):
        return self.out(self.downs(x).flatten(1))


model, judge = Generator().to(device), Discriminator().to(device)
opt_g, opt_d = torch.optim.Adam(model.parameters(), 2e-4, betas=(0.5, 0.999)), torch.optim.Adam(judge.parameters(), 2e-4, betas=(0.5, 0.999))
for step in range(5):
    real, z = torch.randn(20, 3, 32, 32).to(device), torch.randn(20, 64).to(device)
    fake = model(z)
    loss_d = F.relu(1 - judge(real)).mean() + F.relu(1 + judge(fake.detach())).mean()
    opt_d.zero_grad()
    loss_d.backward()
    opt_d.step()
    loss_g = -judge(fake).mean()
    opt_g.zero_grad()
    loss_g.backward()
    opt_g.step()
    print(f"step {step} judge {loss_d.item():.9f} generator {loss_g.item():.9f}")
print(f"judge {sum(float(p.detach().double().abs().sum()) for p in judge.parameters()):.9f}")

print(f"weights {sum(float(p.detach().double().abs().sum()) for p in model.parameters()):.9f}")
torch.save(model.state_dict(), "out.pt")
