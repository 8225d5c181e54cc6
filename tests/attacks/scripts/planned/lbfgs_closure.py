"""LBFGS with a closure that is called several times in a step."""

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

model = nn.Sequential(*[layer for _ in range(5) for layer in (nn.Linear(512, 512), nn.Tanh())], nn.Linear(512, 1)).to(device)
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3, history_size=3)
x = torch.randn(4096, 512).to(device)
y = x[:, :8].sin().sum(1, keepdim=True)
for step in range(4):
    calls = 0

    def closure():
        global calls
        calls += 1
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    print(f"step {step} loss {loss.item():.9f} calls {calls}")

print(f"weights {sum(float(p.detach().double().abs().sum()) for p in model.parameters()):.9f}")
torch.save(model.state_dict(), "out.pt")
