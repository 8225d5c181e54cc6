"""A small student learns from the logits and hidden states of a larger frozen teacher."""

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


class Block(nn.Module):
    def __init__(self, width, heads=4, dropout=0.0):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)
        self.heads = heads

    def forward(self, x, mask=None):
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / math.sqrt(w // self.heads)
        if mask is not None:
            scores = scores.masked_fill(mask, float("-inf"))
        y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, w)
        x = x + self.drop(self.out(y))
        return x + self.drop(self.mlp(self.norm2(x)))


class LM(nn.Module):
    def __init__(self, vocab=512, width=256, layers=4, length=128, dropout=0.0, tied=False):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, dropout=dropout) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.tok.weight

    def features(self, ids):
        t = ids.shape[1]
        mask = torch.ones(t, t, dtype=torch.bool, device=ids.device).triu(1)
        x = self.tok(ids) + self.pos(torch.arange(t, device=ids.device))
        for block in self.blocks:
            x = block(x, mask)
        return self.norm(x)

    def forward(self, ids, targets=None):
        logits = self.head(self.features(ids))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.reshape(-1))


def batch(size=12, length=96, vocab=512):
    ids = torch.randint(0, vocab, (size, length + 1)).to(device)
    return ids[:, :-1], ids[:, 1:]


teacher = LM(width=256, layers=3).to(device).eval()
for p in teacher.parameters():
    p.requires_grad_(False)
model = LM(width=192, layers=3).to(device)
project = nn.Linear(192, 256).to(device)
optimizer = torch.optim.AdamW([*model.parameters(), *project.parameters()], lr=1e-3)
for step in range(5):
    x, y = batch()
    with torch.no_grad():
        hidden_t = teacher.features(x)
        logits_t = teacher.head(hidden_t)
    hidden = model.features(x)
    logits = model.head(hidden)
    soft = F.kl_div((logits / 2).log_softmax(-1), (logits_t / 2).log_softmax(-1), log_target=True, reduction="batchmean") / 96 * 4
    loss = F.cross_entropy(logits.flatten(0, 1), y.flatten()) + soft + F.mse_loss(project(hidden), hidden_t)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.9f} soft {soft.item():.9f}")

print(f"weights {sum(float(p.detach().double().abs().sum()) for p in model.parameters()):.9f}")
torch.save(model.state_dict(), "out.pt")
