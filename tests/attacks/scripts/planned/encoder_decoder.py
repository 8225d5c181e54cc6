"""torch's own Transformer, padded sequences with a label smoothing and an inverse square root schedule."""

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


class Seq2Seq(nn.Module):
    def __init__(self, vocab=600, width=192):
        super().__init__()
        self.emb = nn.Embedding(vocab, width, padding_idx=0)
        self.net = nn.Transformer(width, 4, 3, 3, 512, dropout=0.1, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, src, tgt):
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1], device=src.device)
        y = self.net(self.emb(src), self.emb(tgt), tgt_mask=mask, tgt_is_causal=True, src_key_padding_mask=src == 0, memory_key_padding_mask=src == 0)
        return self.head(y)


model = Seq2Seq().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.98))
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min((s + 1) ** -0.5, (s + 1) * 3 ** -1.5))
criterion = nn.CrossEntropyLoss(ignore_index=0, label_smoothing=0.1)
for step in range(6):
    src, tgt = torch.randint(1, 600, (16, 64)), torch.randint(1, 600, (16, 65))
    src[:, 50 + step:] = 0
    tgt[::2, 40:] = 0
    src, tgt = src.to(device), tgt.to(device)
    logits = model(src, tgt[:, :-1])
    loss = criterion(logits.flatten(0, 1), tgt[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    print(f"step {step} loss {loss.item():.9f}")

print(f"weights {sum(float(p.detach().double().abs().sum()) for p in model.parameters()):.9f}")
torch.save(model.state_dict(), "out.pt")
