"""A character model by GRU cells whose state is carried over batches (truncated backpropagation through time)."""

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


class Model(nn.Module):
    def __init__(self, width=384):
        super().__init__()
        self.emb = nn.Embedding(128, width)
        self.cells = nn.ModuleList([nn.GRUCell(width, width) for _ in range(2)])
        self.head = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, 128))

    def forward(self, ids, state):
        out = []
        for t in range(ids.shape[1]):
            x = self.emb(ids[:, t])
            new = []
            for cell, s in zip(self.cells, state):
                x = cell(x, s)
                new.append(x)
            state = new
            out.append(x)
        return self.head(torch.stack(out, 1)), state


model = Model().to(device)
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
state = [torch.zeros(24, 384, device=device) for _ in range(2)]
for step in range(6):
    ids = torch.randint(0, 128, (24, 41)).to(device)
    logits, state = model(ids[:, :-1], state)
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.1)
    optimizer.step()
    state = [s.detach() for s in state]
    print(f"step {step} loss {loss.item():.9f} state {state[0].abs().mean().item():.9f}")

print(f"weights {sum(float(p.detach().double().abs().sum()) for p in model.parameters()):.9f}")
torch.save(model.state_dict(), "out.pt")
