"""A training loop that keeps the graph of every step, as `total += loss` does: what the recordings of this folder are of."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--device", default="cuda")
device = parser.parse_args().device

model = nn.Sequential(nn.Linear(512, 1536), nn.GELU(), nn.Linear(1536, 512)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
total = torch.zeros((), device=device)
for _ in range(6):
    batch = torch.randn(2048, 512, device=device)
    loss = (model(batch) - batch).square().mean()
    loss.backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
    total = total + loss
print(total.item())
