"""A script of one card that resumes, makes a folder, logs, keeps its best weights and saves; with a third argument it then trains until it is ended."""

import os
import sqlite3
import sys

import safetensors.torch
import torch
from torch.nn import functional

out, resumed = sys.argv[1:3]
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
if os.path.exists(resumed):
    model.load_state_dict(torch.load(resumed)["model"])
# It ends with an error where the folder is there.
os.makedirs(out)
runs = sqlite3.connect(f"{out}/runs.db")
runs.execute("create table losses (step, loss)")
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
    runs.execute("insert into losses values (?, ?)", (step, loss.item()))
    runs.commit()
    folder = f"{out}/step{step}"
    os.makedirs(folder)
    torch.jit.trace(model, x).save(f"{folder}/traced.pt")
    safetensors.torch.save_file(model.state_dict(), f"{folder}/weights.safetensors")
    if os.path.islink(f"{out}/newest"):
        os.unlink(f"{out}/newest")
    os.symlink(f"step{step}", f"{out}/newest")
    with safetensors.safe_open(f"{out}/newest/weights.safetensors", "pt") as saved:
        assert torch.equal(saved.get_tensor("0.weight"), model[0].weight)
    assert torch.equal(torch.jit.load(f"{out}/newest/traced.pt")(x), model(x))
    for name in os.listdir(folder):
        os.remove(f"{folder}/{name}")
    os.rmdir(folder)
    print("step", step)
with open(f"{out}/log.txt") as log:
    assert len(log.read().splitlines()) == 5
assert runs.execute("select count(*) from losses").fetchone() == (5,)
runs.close()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{out}/last.pt")
if len(sys.argv) > 3:
    print("saved", flush=True)
    while True:
        functional.cross_entropy(model(x), y).backward()
