"""Images with mixup, SWA of the weights and update_bn at the end."""

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

from torch.optim.swa_utils import SWALR, AveragedModel, update_bn


class Res(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width))

    def forward(self, x):
        return F.relu(x + self.net(x), inplace=True)


model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), *[Res(32) for _ in range(4)], nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
average = AveragedModel(model)
schedule = SWALR(optimizer, swa_lr=0.05)
data = [(torch.randn(24, 3, 32, 32), torch.randint(0, 10, (24,))) for _ in range(6)]
for step, (x, y) in enumerate(data):
    x, y = x.to(device), y.to(device)
    lam = np.random.beta(0.2, 0.2)
    order = torch.randperm(len(x), device=device)
    logits = model(lam * x + (1 - lam) * x[order])
    loss = lam * F.cross_entropy(logits, y) + (1 - lam) * F.cross_entropy(logits, y[order])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step >= 2:
        average.update_parameters(model)
        schedule.step()
    print(f"step {step} loss {loss.item():.9f} lam {lam:.6f}")
update_bn([x.to(device) for x, _ in data[:2]], average)
print(f"average {sum(float(p.detach().double().abs().sum()) for p in average.parameters()):.9f}")
print(f"buffers {sum(float(b.double().abs().sum()) for b in average.buffers()):.9f}")

print(f"weights {sum(float(p.detach().double().abs().sum()) for p in model.parameters()):.9f}")
torch.save(model.state_dict(), "out.pt")
