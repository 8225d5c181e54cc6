"""A post-mortem of a run that ended out of memory: what was allocated, by which line, and what to do about it.

The loop keeps each step's loss with its graph, as `total += loss` does, until the memory that it may have is used up.

    python examples/out_of_memory.py                  on a card or without one: writes out_of_memory.pickle
    tightfit doctor out_of_memory.pickle              who holds what at the end, what grows, what to change
    tightfit report out_of_memory.pickle -o page.html  the same as a page
"""

import argparse

import torch
from torch import nn

import tightfit

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=512)
parser.add_argument("--memory-mib", type=int, default=64, help="what the activations may take, before it ends")
parser.add_argument("--output", default="out_of_memory.pickle")
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
with tightfit.record(args.output):
    model = nn.Sequential(nn.Linear(args.width, args.width), nn.GELU(), nn.Linear(args.width, args.width)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    total = torch.zeros((), device=device)
    saved_mib_per_step = 3 * 256 * args.width * 4 / 2**20
    for _ in range(int(args.memory_mib / saved_mib_per_step)):
        loss = model(torch.randn(256, args.width, device=device)).square().mean()
        loss.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        total = total + loss  # `loss.item()` would free the graph
print(f"wrote {args.output}: tightfit doctor {args.output}")
