"""A script of one card that resumes, makes a folder, logs, keeps its best weights and saves; with a third argument it then trains until it is ended."""

import os
import sys

import torch
from torch.nn import functional

out, resumed = sys.argv[1:3]
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
if os.path.exists(resumed):
    model.load_state_dict(torch.load(resumed)["model"])
# It ends with an error where the folder is there.
os.makedirs(out)
order = list({"first", "second", "third", "fourth"})
for step in range(5):
    x, y = torch.randn(8, 8) + order.index("first"), torch.randint(0, 4, (8,))
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    with open(f"{out}/log.txt", "a") as log:
        print(step, loss.item(), file=log)
    best = f"{out}/best.pt"
    if not os.path.exists(best) or loss.item() < torch.load(best)["loss"]:
        torch.save({"loss": loss.item(), "model": model.state_dict()}, best)
    print("step", step)
with open(f"{out}/log.txt") as log:
    assert len(log.read().splitlines()) == 5
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{out}/last.pt")
if len(sys.argv) > 3:
    print("saved", flush=True)
    while True:
        functional.cross_entropy(model(x), y).backward()
