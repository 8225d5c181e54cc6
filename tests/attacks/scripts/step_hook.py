"""Trains wide layers; a step hook of the optimizer, which the trace sees, scales gradients."""

import torch
from torch import nn
from torch.nn import functional

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = nn.Sequential(
    *[layer for _ in range(6) for layer in (nn.Linear(1024, 1024), nn.Tanh())], nn.Linear(1024, 10)
).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=2.0)


def scale(seen, args, kwargs):
    for group in seen.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                p.grad.mul_(0.01)


optimizer.register_step_pre_hook(scale)
for step in range(5):
    x, y = torch.randn(16, 1024).to(device), torch.randint(0, 10, (16,)).to(device)
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.9f}")
print(f"weights {sum(float(p.detach().double().abs().sum()) for p in model.parameters()):.6f}")
