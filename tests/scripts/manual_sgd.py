"""Regression with a plain MLP; the update rule is written by hand, without torch.optim."""

import argparse
import math

import torch
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, default=1024)
parser.add_argument("--hidden", type=int, default=2048)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--lr", type=float, default=0.05)
args = parser.parse_args()

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)

sizes = [64] + [args.hidden] * (args.layers - 1) + [1]
weights = []
for fan_in, fan_out in zip(sizes[:-1], sizes[1:]):
    w = torch.randn(fan_in, fan_out, device=device) * math.sqrt(2 / fan_in)
    b = torch.zeros(fan_out, device=device)
    weights.append((w.requires_grad_(), b.requires_grad_()))
params = [p for pair in weights for p in pair]

x = torch.randn(4 * args.batch_size, 64)
y = torch.sin(x.sum(dim=1, keepdim=True) / 8)


def model(h):
    for i, (w, b) in enumerate(weights):
        h = torch.addmm(b, h, w)
        if i + 1 < len(weights):
            h = F.relu(h)
    return h


for step in range(args.steps):
    idx = torch.randperm(len(x))[: args.batch_size]
    loss = F.mse_loss(model(x[idx].to(device)), y[idx].to(device))
    loss.backward()
    lr = args.lr * (1 - step / args.steps)
    with torch.no_grad():
        norm = torch.sqrt(sum((p.grad**2).sum() for p in params))
        for p in params:
            if norm > 1.0:
                p.grad.div_(norm)
            p.add_(p.grad, alpha=-lr)
            p.grad = None
    if step % 5 == 0 or step == args.steps - 1:
        print(f"step {step} loss {loss.item():.5f}")

with torch.no_grad():
    print(f"final loss {F.mse_loss(model(x.to(device)).cpu(), y).item():.5f}")
if device.type == "cuda":
    torch.cuda.synchronize()
    print(torch.cuda.get_device_name(), torch.cuda.max_memory_allocated())
