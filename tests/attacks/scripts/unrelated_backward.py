"""Trains wide layers; a probe's backward pass comes between the backward pass of the model and its step."""

import torch
from torch import nn
from torch.nn import functional

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = nn.Sequential(
    *[layer for _ in range(6) for layer in (nn.Linear(1024, 1024), nn.Tanh())], nn.Linear(1024, 10)
).to(device)
probe = nn.Linear(1024, 1).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for step in range(5):
    x, y = torch.randn(16, 1024).to(device), torch.randint(0, 10, (16,)).to(device)
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(x), y)
    loss.backward()
    probe.zero_grad()
    probe(x).mean().backward()
    optimizer.step()
    print(f"loss {loss.item():.9f}")
print(f"weights {sum(float(p.detach().double().abs().sum()) for p in model.parameters()):.6f}")
