"""A training script whose fifth batches are long: losses, the sum of all weights, and what the allocator held, as one line of JSON."""

import json

import torch
from torch import nn

torch.manual_seed(0)
torch.use_deterministic_algorithms(True, warn_only=True)
layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
model = nn.Sequential(nn.Embedding(1000, 512), nn.TransformerEncoder(layer, 6), nn.Linear(512, 1000)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
losses = []
for step in range(20):
    ids = torch.randint(1000, (16, 1024 if step % 5 == 4 else 128), device="cuda")
    loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
found = {"losses": losses, "weights": sum(float(p.detach().double().sum()) for p in model.parameters())}
free, total = torch.cuda.mem_get_info()
found |= {"reserved": torch.cuda.max_memory_reserved(), "in_use": total - free}
print(json.dumps(found))
